"""Where texts end, with every scheduler."""

import itertools

import numpy as np
import pytest
import torch
from toys import CLS, EMITTED, MASK, SEP, assert_follows, seeded, toy_model, toy_tokenizer
from writing import INF, SAMPLES, STEPS, WORDS, build, lists, passes_of, prediction


def stopping_at(stops):
    """Allowed ids that put the terminator of each row at one column of the canvas, and nowhere else."""

    def allowed(canvas, positions):
        rows, columns = positions // canvas.shape[1], positions % canvas.shape[1]
        ending = columns == torch.tensor(stops)[rows]
        mask = torch.zeros(len(positions), 8, dtype=torch.bool)
        mask[~ending, 5:] = True
        mask[ending, SEP] = True
        return mask

    return allowed


@pytest.mark.parametrize("steps", [None, 1, 6])
@pytest.mark.parametrize("limit", [32, 9])
def test_rows_that_ended_cost_nothing(kind, limit, steps):
    model = toy_model(max_position_embeddings=limit)
    pipe = build(kind, model)
    embedded = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: embedded.append(args[0].tolist()))
    seen = passes_of(model)
    steps = steps or STEPS[kind]
    stops = [2 + 3, 2 + 9, -1]
    out = pipe(
        ["a", "b", "c"],
        gen_length=16,
        block_length=4,
        allowed_token_ids=stopping_at(stops),
        num_inference_steps=steps,
        generator=seeded(),
    )
    assert [len(sequence) for sequence in out.sequences] == [stops[0] + 1, stops[1] + 1, 19]
    assert [len(text.split()) for text in out.texts] == [1 + 3, 1 + 9, 1 + 16]
    # Blocks that are run: 1 of row 0, 3 of row 1, 4 of row 2. One position a pass; the spindle encodes as often.
    rows = sum(map(len, embedded))
    if steps is None:
        assert rows == 4 * (1 + 3 + 4)
    else:
        assert rows <= min(steps, 4 if kind != "remdm" else steps) * (1 + 3 + 4)
    assert all(MASK in row for passed in embedded for row in passed)
    if limit == 32:
        for row in [row for passed in seen for row in passed] if kind != "spindle" else itertools.chain(*embedded):
            if SEP in row[2:18]:
                assert (row.index(SEP) - 2) // 4 == (row.index(MASK) - 2) // 4


def test_nothing_is_run_once_all_rows_have_ended(pipe):
    embedded = []
    pipe.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: embedded.extend(args[0].tolist()))
    out = pipe(["a", "b"], gen_length=25, block_length=5, allowed_token_ids=stopping_at([4, 6]), generator=seeded())
    assert [len(sequence) for sequence in out.sequences] == [5, 7]
    assert all(MASK in row[2:7] for row in embedded)  # the first block


def test_a_text_does_not_end_in_a_gap_of_its_prompt(pipe):
    out = pipe("[MASK] a [MASK]", gen_length=6, block_length=3, num_texts_per_prompt=300, generator=seeded())
    assert all(sequence[1] in WORDS and sequence[3] in WORDS for sequence in lists(out))
    assert all(sequence.index(SEP) == len(sequence) - 1 for sequence in lists(out))
    lengths = [len(sequence) for sequence in lists(out)]
    assert min(lengths) == 5  # it ended with the first new token
    assert max(lengths) == 11


def test_a_given_separator_does_not_end_a_text_in_blocks(pipe):
    ids = torch.tensor([[CLS, 5, SEP, 6, MASK, SEP]])
    out = pipe(input_ids=ids, gen_length=5, block_length=2, suppress_tokens=[SEP], generator=seeded())
    sequence = lists(out)[0]
    assert len(sequence) == 11
    assert sequence[:4] == [CLS, 5, SEP, 6]
    assert set(sequence[4:-1]) <= set(WORDS)
    assert len(out.texts[0].split()) == 8


def test_without_the_terminator_texts_have_their_full_length(pipe):
    arguments = {"gen_length": 12, "block_length": 5, "num_texts_per_prompt": 50}
    out = pipe(**arguments, suppress_tokens=[SEP], generator=seeded())
    assert {len(sequence) for sequence in out.sequences} == {14}
    assert {len(text.split()) for text in out.texts} == {12}
    banned = pipe(**arguments, eos_penalty=INF, generator=seeded())
    assert lists(banned) == lists(out)


def test_the_end_of_sequence_token_ends_texts_where_the_tokenizer_has_one(kind):
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = "c"
    pipe = build(kind, tokenizer=tokenizer)
    out = pipe("a", gen_length=9, block_length=2, num_texts_per_prompt=40, generator=seeded())
    for sequence, text in zip(lists(out), out.texts):
        assert set(sequence[1:-1]) <= {5, 6}
        assert sequence[-1] == 7 or (sequence[-1] == SEP and len(sequence) == 12)
        assert text == " ".join("ab"[i - 5] for i in sequence[1:-1])
    assert {sequence[-1] for sequence in lists(out)} >= {7}


def test_without_any_terminator_texts_have_their_full_length(kind):
    tokenizer = toy_tokenizer()
    tokenizer.sep_token = None
    out = build(kind, tokenizer=tokenizer)(gen_length=9, block_length=2, eos_penalty=1.0, num_texts_per_prompt=5)
    assert all(len(sequence) == 11 and MASK not in sequence for sequence in lists(out))


def test_eos_penalty_lengthens_texts(pipe):
    lengths = [
        np.mean(
            [
                len(sequence)
                for sequence in pipe(
                    gen_length=6, block_length=2, eos_penalty=nats, num_texts_per_prompt=300, generator=seeded()
                ).sequences
            ]
        )
        for nats in (0.0, 1.5, 4.0)
    ]
    assert lengths[0] + 0.3 < lengths[1] < lengths[2]


def test_eos_penalty_is_counted_in_nats():
    model = toy_model()
    out = build(model=model)(gen_length=1, eos_penalty=1.3, num_texts_per_prompt=SAMPLES, generator=seeded())
    p = prediction(model, [CLS, MASK, SEP], 1, change=lambda logits: logits - 1.3 * np.eye(8)[SEP])
    assert_follows([sequence[1:2] for sequence in lists(out)], {(token,): p[token] for token in EMITTED})
