"""From a corpus to rows: every token once, every text counted, and a key of its own for each row's noise."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from toys import CLS, PAD, SEP, toy_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diffusers_text import maskable_tokens
from diffusers_text.evaluation.corpus import TEXTS_AT_ONCE, Corpus, encode_corpus

IDS = {"a": 5, "b": 6, "c": 7}
BLANK = ["", " ", "\n", "\t  "]
GAP = st.sampled_from([" ", "  ", "\n", "\t", " \n "])  # between words; a row ends at none of them


@st.composite
def spaced_words(draw, longest=12):
    words = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=longest))
    return "".join(part for word in words for part in (draw(GAP), word)) + draw(st.sampled_from(["", "\n"]))


TEXTS = st.lists(st.one_of(spaced_words(), st.sampled_from(BLANK)), min_size=1, max_size=12)
SIZES = st.integers(3, 9)  # of a row
EXAMPLES = settings(max_examples=150, deadline=None)


def tokenizer_with(names):
    """Of the words a, b and c, with the special tokens of these names and no template of its own."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, **IDS}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokens = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens, **names)


TOKENIZERS = {  # and the ids that begin a row and end a text
    "start and terminator": (toy_tokenizer(), [CLS], [SEP]),
    "terminator only": (tokenizer_with({"eos_token": "[SEP]"}), [], [SEP]),
    "start only": (tokenizer_with({"bos_token": "[CLS]"}), [CLS], []),
    "neither": (tokenizer_with({}), [], []),
}


@pytest.fixture(params=TOKENIZERS)
def kind(request):
    return TOKENIZERS[request.param]


@pytest.fixture
def tokenizer():
    return toy_tokenizer()


def ids_of(text):
    return [IDS[word] for word in re.split(r"\s+", text) if word]


def lists(corpus):
    return [row["input_ids"].tolist() for row in corpus.rows]


def maskable(row, tokenizer):
    row = torch.as_tensor(row)
    return row[maskable_tokens(row, tokenizer)].tolist()


# --- Texts ---


@EXAMPLES
@given(kind=st.sampled_from([*TOKENIZERS.values()]), texts=TEXTS, size=SIZES, packing=st.booleans())
def test_no_token_is_lost_or_doubled(kind, texts, size, packing):
    tokenizer, start, end = kind
    stream = [token for text in texts if text.strip() for token in [*ids_of(text), *end]]
    if not stream:
        with pytest.raises(
            ValueError, match=f"The corpus has no text: {len(texts)} texts, {len(texts)} of them blank"
        ):
            encode_corpus(texts, tokenizer, size, packing=packing)
        return
    corpus = encode_corpus(texts, tokenizer, size, packing=packing)
    rows = lists(corpus)
    assert [token for row in rows for token in maskable(row, tokenizer)] == stream
    assert corpus.tokens == len(stream)
    assert all(row[: len(start)] == start and len(start) < len(row) <= size for row in rows)


@EXAMPLES
@given(
    kind=st.sampled_from([*TOKENIZERS.values()]), texts=TEXTS.filter(lambda texts: "".join(texts).strip()), size=SIZES
)
def test_packed_rows_are_full_but_for_the_last(kind, texts, size):
    corpus = encode_corpus(texts, kind[0], size)
    assert all(len(row) == size for row in lists(corpus)[:-1])
    assert (corpus.packing, corpus.split_texts) == (True, 0)


@EXAMPLES
@given(
    kind=st.sampled_from([*TOKENIZERS.values()]), texts=TEXTS.filter(lambda texts: "".join(texts).strip()), size=SIZES
)
def test_without_packing_a_row_is_of_one_text_and_long_texts_have_several(kind, texts, size):
    tokenizer, start, end = kind
    body = size - len(start)
    pieces = []
    for text in texts:
        ids = [*ids_of(text), *end] if text.strip() else []
        pieces.append([start + ids[i : i + body] for i in range(0, len(ids), body)])
    corpus = encode_corpus(texts, tokenizer, size, packing=False)
    assert lists(corpus) == [row for rows in pieces for row in rows]
    assert corpus.split_texts == sum(len(rows) > 1 for rows in pieces)
    assert corpus.packing is False
    if corpus.split_texts:
        with pytest.raises(ValueError, match=f"^{corpus.split_texts} texts are longer than `max_length` {size}"):
            encode_corpus(texts, tokenizer, size, packing=False, long_texts="error")
    else:
        strict = encode_corpus(texts, tokenizer, size, packing=False, long_texts="error")
        assert lists(strict) == lists(corpus)


@EXAMPLES
@given(texts=TEXTS.filter(lambda texts: "".join(texts).strip()), size=SIZES, packing=st.booleans())
def test_words_are_of_white_space_and_texts_those_that_are_not_blank(texts, size, packing):
    corpus = encode_corpus(texts, TOKENIZERS["start and terminator"][0], size, packing=packing)
    assert corpus.blank_texts == sum(not re.search(r"\S", text) for text in texts)
    assert corpus.texts == len(texts) - corpus.blank_texts
    assert corpus.words == sum(len(re.findall(r"\S+", text)) for text in texts)
    assert corpus.words == corpus.tokens - corpus.texts  # here a word is a token, and a text has a terminator


def test_words_are_what_stands_between_white_space_whatever_the_tokens(tokenizer):
    corpus = encode_corpus(["a a, don't\u00a0zebra - c"], tokenizer, 16)
    assert corpus.words == 6  # as `str.split` has it, which takes the space that does not break for one
    assert corpus.tokens == 7


def test_the_last_row_holds_the_rest_and_rows_are_cut_anywhere(tokenizer):
    corpus = encode_corpus(["a b", " ", "c", "a b c"], tokenizer, 4)
    assert lists(corpus) == [[CLS, 5, 6, SEP], [CLS, 7, SEP, 5], [CLS, 6, 7, SEP]]
    corpus = encode_corpus(["a b", "c", "a"], tokenizer, 5)
    assert lists(corpus) == [[CLS, 5, 6, SEP, 7], [CLS, SEP, 5, SEP]]
    assert corpus[1:] == (7, 3, 4, 0, 0, True)


def test_a_text_that_fits_but_for_its_terminator_is_split(tokenizer):
    """The terminator is a token as any other: a row of its own is how it is not left out."""
    corpus = encode_corpus(["a b c", "a b"], tokenizer, 4, packing=False)
    assert lists(corpus) == [[CLS, 5, 6, 7], [CLS, SEP], [CLS, 5, 6, SEP]]
    assert corpus.split_texts == 1


@pytest.mark.parametrize("packing", [True, False])
def test_texts_may_come_in_any_container(kind, packing):
    tokenizer = kind[0]
    texts = ["a b c a b", "", "c", "  ", "b a"]
    expected = encode_corpus(texts, tokenizer, 5, packing=packing)
    datasets = {
        "text": Dataset.from_dict({"text": texts, "number": [1, 2, 3, 4, 5]}),
        "prose": Dataset.from_dict({"prose": texts, "text": ["c"] * 5}),
    }
    found = [encode_corpus(given, tokenizer, 5, packing=packing) for given in (tuple(texts), iter(texts))]
    for column, dataset in datasets.items():
        found.append(encode_corpus(dataset, tokenizer, 5, column, packing))
    for corpus in found:
        assert lists(corpus) == lists(expected)
        assert corpus[1:] == expected[1:]


def test_more_texts_than_the_tokenizer_gets_at_once_are_as_few(tokenizer):
    """Blank ones among them, also where one part ends and the next begins."""
    texts = ["a " * (i % 4) for i in range(2 * TEXTS_AT_ONCE + 30)]
    bars = []

    class Bar:
        def __init__(self, total):
            bars.append(self)
            self.total, self.n = total, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, n=1):
            self.n += n

        def set_description(self, _):
            pass

    corpus = encode_corpus(texts, tokenizer, 50, progress_bar=Bar)
    stream = [token for text in texts if text for token in [*ids_of(text), SEP]]
    assert [token for row in lists(corpus) for token in row[1:]] == stream
    assert corpus.blank_texts == len(texts) // 4 + 1
    assert [(bar.total, bar.n) for bar in bars] == [(len(texts), len(texts))]


# --- Rows that are given ---


def test_rows_of_ids_stay_as_they_are_and_beginnings_do_not_count(tokenizer):
    rows = {
        "input_ids": [[CLS, 5, 6, 7, SEP], [CLS, 7, SEP, PAD, PAD], [CLS, 5, SEP, 6, SEP]],
        "prompt_length": [3, 0, 3],
        "token_type_ids": [[0] * 5, [0] * 5, [0, 0, 0, 1, 1]],
        "text": ["not", "looked", "at"],
    }
    corpus = encode_corpus(Dataset.from_dict(rows), tokenizer, 5)
    assert lists(corpus) == rows["input_ids"]
    for name in ("prompt_length", "token_type_ids"):
        assert [row[name] for row in corpus.rows] == rows[name]
    assert all(set(row) == {"input_ids", "prompt_length", "token_type_ids"} for row in corpus.rows)
    assert corpus[1:] == (2 + 2 + 2, None, None, 0, 0, None)
    only_ids = encode_corpus(Dataset.from_dict({"input_ids": rows["input_ids"]}), tokenizer, 5)
    assert only_ids.tokens == 4 + 2 + 4
    assert all(set(row) == {"input_ids"} for row in only_ids.rows)


@EXAMPLES
@given(
    rows=st.lists(
        st.tuples(st.lists(st.sampled_from([5, 6, 7, SEP]), min_size=1, max_size=8), st.integers(0, 9)), min_size=1
    )
)
def test_given_rows_count_what_stands_behind_their_beginnings(rows):
    ids, lengths = [[CLS, *body] for body, _ in rows], [length for _, length in rows]
    dataset = Dataset.from_dict({"input_ids": ids, "prompt_length": lengths})
    tokens = sum(i >= length for row, length in zip(ids, lengths) for i in range(1, len(row)))
    if tokens:
        assert encode_corpus(dataset, TOKENIZERS["start and terminator"][0], 9).tokens == tokens
    else:
        with pytest.raises(ValueError, match="The corpus has no token that can be noised"):
            encode_corpus(dataset, TOKENIZERS["start and terminator"][0], 9)


# --- Keys ---


def keys_of(rows):
    return Corpus([{"input_ids": np.array(row)} for row in rows], 1, None, None, 0, 0, None).keys


@EXAMPLES
@given(
    data=st.data(), rows=st.lists(st.lists(st.sampled_from([5, 6]), min_size=1, max_size=3), min_size=1, max_size=12)
)
def test_keys_depend_on_tokens_alone_and_tell_copies_apart(data, rows):
    keys = keys_of(rows)
    assert len(set(keys)) == len(rows)
    # The same first number for the same tokens and for no others, and the copies numbered from 0.
    by_tokens = {}
    for row, (key, number) in zip(rows, keys):
        assert by_tokens.setdefault(tuple(row), (key, []))[0] == key
        by_tokens[tuple(row)][1].append(number)
    assert len({key for key, _ in by_tokens.values()}) == len(by_tokens)
    assert all(numbers == [*range(len(numbers))] for _, numbers in by_tokens.values())
    # In another order, and with rows in between, each text has the same noise.
    others = [[7], *data.draw(st.permutations(rows)), [7]]
    assert set(keys) < set(keys_of(others))


def test_keys_are_the_same_however_the_ids_are_kept(tokenizer):
    texts = ["a b", "c", "a b"]
    corpus = encode_corpus(texts, tokenizer, 8, packing=False)
    given_rows = encode_corpus(Dataset.from_dict({"input_ids": lists(corpus)}), tokenizer, 8)
    assert given_rows.keys == corpus.keys
    assert corpus.keys[0][0] == corpus.keys[2][0] != corpus.keys[1][0]


# --- Errors ---


@pytest.mark.parametrize(
    ("texts", "kwargs", "message"),
    [
        (["a"], {"max_length": 2}, "`max_length` must be an integer >= 3, got 2"),
        (["a"], {"max_length": 8.0}, "`max_length` must be an integer >= 3, got 8.0"),
        (["a"], {"max_length": True}, "`max_length` must be an integer >= 3, got True"),
        (["a"], {"long_texts": "cut"}, "`long_texts` must be 'split' or 'error', got 'cut'"),
        ([], {}, "The corpus has no text: 0 texts, 0 of them blank"),
        (["", "\n"], {}, "The corpus has no text: 2 texts, 2 of them blank"),
        (["a", 1], {}, "Text 1 is no text, but 1"),
        ([None, " "], {}, "The corpus has no text: 2 texts, 2 of them blank"),
        ({"train": ["a"], "test": ["b"]}, {}, "one split of a dataset, got ['test', 'train']"),
        (DatasetDict(test=Dataset.from_dict({"text": ["a"]})), {}, "one split of a dataset, got ['test']"),
        ([{"text": "a"}], {}, "Text 0 is no text, but {'text': 'a'}"),
        (["a"] * 1500 + [7], {}, "Text 1500 is no text, but 7"),
        (
            ["a", " ", "a b c", "b", "c b a b"],
            {"packing": False, "long_texts": "error", "max_length": 4},
            "2 texts are longer than `max_length` 4, the first of them number 1 of those that are not blank, with 3"
            " tokens of 2.",
        ),
        (Dataset.from_dict({"prose": ["a"], "number": [1]}), {}, "has no column 'text', it has ['number', 'prose']"),
        (Dataset.from_dict({"text": ["a"]}), {"text_column": "prose"}, "has no column 'prose', it has ['text']"),
        (Dataset.from_dict({"text": [1, 2]}), {}, "Text 0 is no text, but 1"),
        (Dataset.from_dict({"input_ids": []}), {}, "The corpus has no rows"),
        (Dataset.from_dict({"input_ids": [[2, 5, 3], [2] * 9]}), {}, "Row 1 has 9 tokens, over `max_length` 8"),
        (Dataset.from_dict({"input_ids": [[2, 0, 0], [2]]}), {}, "The corpus has no token that can be noised"),
    ],
)
def test_what_is_wrong_with_a_corpus_is_said(texts, kwargs, message, tokenizer):
    with pytest.raises(ValueError, match=re.escape(message)):
        encode_corpus(texts, tokenizer, **{"max_length": 8, **kwargs})


def test_packed_texts_are_cut_wherever_a_row_ends(tokenizer):
    corpus = encode_corpus(["a b c a b c"], tokenizer, 4)
    assert (len(corpus.rows), corpus.split_texts) == (3, 0)
    with pytest.raises(ValueError, match="`long_texts='error'` goes with `packing=False`"):
        encode_corpus(["a b c a b c"], tokenizer, 4, long_texts="error")


def test_nulls_are_blank_texts(tokenizer):
    corpus = encode_corpus(Dataset.from_dict({"text": ["a b", None, "c", ""]}), tokenizer, 8)
    assert (corpus.texts, corpus.blank_texts, corpus.words) == (2, 2, 3)


def test_what_reads_like_a_special_token_is_scored():
    """Text in which nobody has masked, ended or padded anything."""
    real_tokenizer = AutoTokenizer.from_pretrained(Path(find_spec("cognition").submodule_search_locations[0], "model"))
    corpus = encode_corpus(["a [MASK] b [SEP] c [PAD]"], real_tokenizer, 32)
    assert corpus.tokens == 3 + 3 * 3 + 1
    assert not set(corpus.rows[0]["input_ids"][1:-1].tolist()) & set(real_tokenizer.all_special_ids)
