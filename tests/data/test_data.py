"""Counting, packing and choosing tokens."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from toys import CLS, MASK, PAD, SEP, UNK, toy_tokenizer
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

from diffusers_text import AbsorbingStateScheduler, count_tokens, maskable_tokens, pack_texts, token_settings
from diffusers_text.data.special_tokens import frame_ids

TEXTS = ["a b a", "c", "a zebra"]  # the zebra is unknown
COUNTS = [0, 1, 0, 3, 0, 3, 1, 1]


@pytest.fixture
def tokenizer():
    return toy_tokenizer()


def test_counts_of_every_kind_of_dataset_agree(tokenizer):
    dataset = Dataset.from_dict({"text": TEXTS, "other": [1, 2, 3]})
    ids = tokenizer(TEXTS)["input_ids"]
    padded = tokenizer(TEXTS, padding=True)["input_ids"]
    for rows, column in (
        (TEXTS, "text"),
        (iter(TEXTS), "text"),
        (dataset, "text"),
        (dataset.to_iterable_dataset(), "text"),
        (ids, "text"),
        (padded, "text"),
        (list(torch.tensor(padded)), "text"),
        (Dataset.from_dict({"input_ids": padded}), "input_ids"),
        (dataset.rename_column("text", "prose"), "prose"),
    ):
        counts = count_tokens(rows, tokenizer, column=column)
        assert counts == COUNTS
        assert all(type(n) is int for n in counts)
    AbsorbingStateScheduler(**token_settings(tokenizer), schedule="spindle", token_counts=counts)


def test_masks_are_not_counted_and_long_texts_are_counted_whole(tokenizer):
    assert count_tokens(["[MASK] a"], tokenizer)[MASK] == 0
    assert count_tokens(["a " * 5000], tokenizer)[5] == 5000


def test_a_progress_bar_is_shown(tokenizer, capsys):
    count_tokens(TEXTS, tokenizer)
    assert "Counting tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("a b", "`dataset` must be an iterable of rows, got str"),
        (3, "`dataset` must be an iterable of rows, got int"),
        ([], "no tokens to count"),
        ([{"prose": "a"}], r"`column` 'text' is not in the dataset, which has \['prose'\]"),
        ([3.5], "must be a text or a list of token ids, got float"),
        ([{"text": None}], "must be a text or a list of token ids, got NoneType"),
        ([[5, 99]], r"token ids outside \[0, 8\)"),
    ],
)
def test_wrong_datasets_are_named(dataset, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        count_tokens(dataset, tokenizer)


def test_packing_joins_texts_with_terminators_and_drops_the_rest(tokenizer):
    rows = pack_texts(["a b", "c", "a b c"], tokenizer, max_length=4)
    assert rows.tolist() == [[CLS, 5, 6, SEP], [CLS, 7, SEP, 5], [CLS, 6, 7, SEP]]
    assert pack_texts(["a b", "c", "a"], tokenizer, max_length=4).tolist() == [[CLS, 5, 6, SEP], [CLS, 7, SEP, 5]]


def test_a_corpus_shorter_than_a_row_is_an_error(tokenizer):
    for texts in ([], ["a b"]):
        with pytest.raises(ValueError, match="too few for one row of `max_length` 6"):
            pack_texts(texts, tokenizer, max_length=6)
    for length in (1, 0, 2.0):
        with pytest.raises(ValueError, match="`max_length` must be an integer >= 2"):
            pack_texts(TEXTS, tokenizer, max_length=length)


def test_start_and_padding_are_not_maskable(tokenizer):
    ids = torch.tensor([[CLS, 5, UNK, MASK, SEP, PAD, PAD]])
    expected = [[False, True, True, False, True, False, False]]
    assert maskable_tokens(ids, tokenizer).tolist() == expected
    tokenizer.pad_token = "[SEP]"
    ids[0, 5:] = SEP
    assert maskable_tokens(ids, tokenizer, torch.tensor([[1, 1, 1, 1, 1, 0, 0]])).tolist() == expected


def test_settings_follow_the_tokenizer(tokenizer):
    assert token_settings(tokenizer) == {
        "mask_token_id": MASK,
        "vocab_size": 8,
        "suppressed_token_ids": [PAD, UNK, CLS],
    }
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="no mask token"):
        token_settings(tokenizer)


def test_special_tokens_without_a_role_are_neither_written_nor_words(tokenizer, tmp_path):
    tokenizer.add_tokens([AddedToken("<|x|>", special=True), AddedToken("<|word|>", special=False)])
    tokenizer.save_pretrained(tmp_path)
    for same in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert 8 not in same.all_special_ids
        assert token_settings(same)["suppressed_token_ids"] == [PAD, UNK, CLS, 8]
        assert frame_ids(same) == {PAD, CLS, SEP, MASK, 8}


def test_a_token_that_ends_texts_is_no_word_even_where_it_is_the_unknown_token_as_well():
    ids = {"<|end|>": 0, "<mask>": 1, "a": 2, "?": 3}
    backend = Tokenizer(WordLevel(ids, unk_token="<|end|>"))
    tokens = {"eos_token": "<|end|>", "unk_token": "<|end|>", "mask_token": "<mask>"}
    assert frame_ids(PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)) == {0, 1}
    assert frame_ids(PreTrainedTokenizerFast(tokenizer_object=backend, **{**tokens, "unk_token": "?"})) == {0, 1}
