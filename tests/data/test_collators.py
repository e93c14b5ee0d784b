"""Batches: labels stand where tokens are generated, and padding changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import CLS, MASK, PAD, SEP, toy_tokenizer

from diffusers_text import DataCollatorForTextDiffusion

ROWS = [{"input_ids": [CLS, 5, MASK, 6, SEP]}, {"input_ids": [CLS, 7, SEP, 5, SEP], "prompt_length": 3}]


def end_padded_tokenizer():
    """Pads with the token that ends texts, as many decoders do."""
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = "[SEP]"
    return tokenizer


@pytest.fixture(params=[toy_tokenizer, end_padded_tokenizer])
def tokenizer(request):
    return request.param()


def test_labels_are_the_maskable_tokens_that_are_not_given(tokenizer):
    batch = DataCollatorForTextDiffusion(tokenizer)(ROWS)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["labels"].tolist() == [[-100, 5, -100, 6, SEP], [-100, -100, -100, 5, SEP]]


def test_padding_is_attended_to_by_nothing_and_never_labelled(tokenizer):
    batch = DataCollatorForTextDiffusion(tokenizer)([*ROWS, {"input_ids": [CLS, 6, SEP]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1]] * 2 + [[1, 1, 1, 0, 0]]
    assert batch["labels"][2].tolist() == [-100, 6, SEP, -100, -100]
    assert batch["input_ids"][2].tolist() == [CLS, 6, SEP] + [tokenizer.pad_token_id] * 2


TOKENS = st.lists(st.sampled_from([SEP, 5, 6, 7]), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(bodies=st.lists(st.tuples(TOKENS, st.integers(0, 6)), min_size=1, max_size=5), multiple=st.integers(1, 9))
def test_more_padding_changes_nothing_else(bodies, multiple):
    rows = [
        {"input_ids": [CLS, *body], "token_type_ids": [0, *[1] * len(body)], "prompt_length": given}
        for body, given in bodies
    ]
    for tokenizer in (toy_tokenizer(), end_padded_tokenizer()):
        tight = DataCollatorForTextDiffusion(tokenizer)(rows)
        padded = DataCollatorForTextDiffusion(tokenizer, pad_to_multiple_of=multiple)(rows)
        width, old = padded["input_ids"].shape[1], tight["input_ids"].shape[1]
        assert width % multiple == 0
        assert 0 <= width - old < multiple
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        inside = (torch.arange(width) < lengths[:, None]).long()
        fillers = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": tokenizer.pad_token_type_id,
            "labels": -100,
        }
        for name, filler in fillers.items():
            assert torch.equal(padded[name][:, :old], tight[name])
            assert (padded[name][inside == 0] == filler).all()
        assert ("attention_mask" in padded) == bool((inside == 0).any())
        assert torch.equal(padded.get("attention_mask", inside), inside)
        for i, (body, given_tokens) in enumerate(bodies):
            generated = [token if 1 + j >= given_tokens else -100 for j, token in enumerate(body)]
            assert padded["labels"][i].tolist() == [-100, *generated] + [-100] * (width - 1 - len(body))


def test_rows_may_be_tensors_or_arrays():
    collate = DataCollatorForTextDiffusion(toy_tokenizer())
    expected = collate(ROWS)
    for kind in (torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32).numpy()):
        batch = collate([{**row, "input_ids": kind(row["input_ids"])} for row in ROWS])
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
        assert batch["input_ids"].dtype == torch.long


def test_a_tokenizer_without_padding_token_takes_rows_of_one_length_only():
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = None
    collate = DataCollatorForTextDiffusion(tokenizer)
    assert collate(ROWS)["input_ids"].shape == (2, 5)
    for rows in ([*ROWS, {"input_ids": [CLS, 6]}], [{"input_ids": [CLS, 6]}, {"input_ids": [CLS, 6, 6]}]):
        with pytest.raises(ValueError, match="no padding token"):
            collate(rows)


def test_padding_inside_a_row_is_not_labelled():
    batch = DataCollatorForTextDiffusion(toy_tokenizer())([{"input_ids": [CLS, 5, SEP, PAD, PAD]}])
    assert batch["labels"].tolist() == [[-100, 5, SEP, -100, -100]]
