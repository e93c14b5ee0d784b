"""Blocks, and texts beyond the model's positions, with every scheduler."""

import pytest
import torch
from diffusers.callbacks import PipelineCallback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from toys import CLS, MASK, SEP, assert_follows, seeded, toy_config, toy_model, toy_tokenizer
from transformers import PreTrainedTokenizerFast
from writing import (
    FAMILIES,
    INF,
    PAIRS,
    SAMPLES,
    SPINDLE,
    STEPS,
    WORDS,
    block_law,
    build,
    cut,
    family_model,
    generated_columns,
    left_to_right_law,
    lists,
    one_each,
    passes_of,
    raw_logits,
    replayed,
    start_canvas,
)

from diffusers_text import DiffusionBertForMaskedDiffusion

# --- Blocks ---


def test_blocks_of_one_follow_the_law_from_left_to_right(kind):
    """One position alone has the model's own prediction under every scheduler: the tilt cancels over its lifetime."""
    model = toy_model()
    out = build(kind, model)(
        gen_length=2, block_length=1, num_texts_per_prompt=SAMPLES, generator=seeded(), output_type="seq"
    )
    assert_follows([sequence[1:] for sequence in lists(out)], left_to_right_law(model, 2))


def test_the_order_of_blocks_matters_to_the_law():
    """Without this, the proof above could pass with blocks that do nothing."""
    model = toy_model()
    out = build("linear", model)(gen_length=2, num_texts_per_prompt=SAMPLES, generator=seeded(), output_type="seq")
    with pytest.raises(AssertionError, match="p = "):
        assert_follows([cut(s, range(1, 3))[1:] for s in lists(out)], left_to_right_law(model, 2))


@pytest.mark.parametrize("conditioning", ["layerwise", "prefix"])
@pytest.mark.parametrize("kind", ["linear", "confidence", "remdm"])
def test_time_begins_anew_in_each_block(conditioning, kind):
    model = toy_model(time_conditioning=conditioning)
    out = build(kind, model)(
        gen_length=2, block_length=1, num_inference_steps=1, num_texts_per_prompt=5000, generator=seeded()
    )
    assert_follows([sequence[1:] for sequence in lists(out)], left_to_right_law(model, 2, t=1.0))


@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("kind", ["linear", "spindle"])
def test_each_block_is_a_reverse_process_of_its_own(kind, steps):
    model = toy_model()
    out = build(kind, model)(
        gen_length=3,
        block_length=2,
        num_inference_steps=steps,
        num_texts_per_prompt=SAMPLES,
        generator=seeded(),
        output_type="seq",
    )
    law = block_law(model, steps or 150, kind, 2, 3, midpoint=steps is None)
    assert_follows([sequence[1:] for sequence in lists(out)], law)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "spindle"])
def test_block_laws_hold_for_another_model_at_a_hundred_thousand_samples(kind):
    model = toy_model(2)
    for steps, block_length in ((1, 2), (4, 2), (None, 2), (2, 1)):
        out = build(kind, model)(
            gen_length=3,
            block_length=block_length,
            num_inference_steps=steps,
            num_texts_per_prompt=100_000,
            generator=seeded(),
            output_type="seq",
        )
        law = block_law(model, steps or 1000, kind, block_length, 3, midpoint=steps is None)
        assert_follows([sequence[1:] for sequence in lists(out)], law)


def test_a_block_of_the_whole_text_is_no_block(pipe):
    prompts = ["a", "b [MASK] c", "[MASK]"]
    arguments = {"prompt": prompts * 5, "gen_length": 7}
    whole = lists(pipe(**arguments, generator=one_each(15)))
    for block_length in (8, 100):  # of a gap and 7 new tokens
        out = pipe(**arguments, generator=one_each(15), block_length=block_length)
        for i, (sequence, text) in enumerate(zip(lists(out), whole)):
            ids = pipe.tokenizer(prompts[i % 3]).input_ids
            assert sequence == cut(text, generated_columns(ids, 7))
    assert lists(pipe(gen_length=7, generator=seeded(), block_length=7)) == [
        cut(sequence, range(1, 8)) for sequence in lists(pipe(gen_length=7, generator=seeded()))
    ]


@pytest.mark.parametrize("steps", [None, 1, 3, 7, 50])
@pytest.mark.parametrize(("length", "block_length"), [(20, 8), (7, 3)])
def test_blocks_leave_no_mask_and_end_with_the_terminator(kind, length, block_length, steps):
    pipe = build(kind, model=toy_model(spread=0.3))
    steps = steps or STEPS[kind]
    out = pipe(
        gen_length=length,
        block_length=block_length,
        num_inference_steps=steps,
        num_texts_per_prompt=6,
        generator=seeded(),
    )
    for sequence, text in zip(lists(out), out.texts):
        assert sequence[0] == CLS
        assert sequence[-1] == SEP
        assert len(sequence) <= length + 2
        assert set(sequence[1:-1]) <= set(WORDS)  # nothing before the terminator ends the text
        assert text == " ".join("abc"[i - 5] for i in sequence[1:-1])
    assert any(len(sequence) < length + 2 for sequence in lists(out)) or length < 20


@pytest.mark.parametrize("steps", [None, 2])
def test_blocks_are_written_strictly_from_left_to_right(kind, steps):
    pipe = build(kind)
    out = pipe(
        ["[MASK] a [MASK] b", "c", "[MASK] [MASK] [MASK]"],
        gen_length=10,
        block_length=3,
        num_inference_steps=steps or STEPS[kind],
        return_trajectory=True,
        generator=seeded(),
    )
    for prompt, trajectory in zip(["[MASK] a [MASK] b", "c", "[MASK] [MASK] [MASK]"], out.trajectory):
        canvas = start_canvas(pipe.tokenizer(prompt).input_ids, 10)
        gaps = [column for column, token in enumerate(canvas) if token == MASK]
        blocks = [gaps.index(position) // 3 for position in trajectory.positions.tolist()]
        assert blocks == sorted(blocks)
        assert blocks[0] == 0


def test_gaps_are_filled_in_blocks_and_given_ids_stay(pipe):
    prompts = ["a [MASK] b [MASK] [MASK] c [MASK]", "[MASK] a", "b b"]
    out = pipe(prompts * 20, block_length=2, generator=seeded())
    for i, (sequence, text) in enumerate(zip(lists(out), out.texts)):
        ids = pipe.tokenizer(prompts[i % 3]).input_ids
        assert len(sequence) == len(ids)
        assert all(new in WORDS if old == MASK else new == old for new, old in zip(sequence, ids))
        assert len(text.split()) == len(ids) - 2


@pytest.mark.parametrize("limit", [32, 12])
@pytest.mark.parametrize("steps", [None, 3])
def test_unequal_prompts_in_blocks_equal_each_alone(kind, steps, limit):
    pipe = build(kind, toy_model(max_position_embeddings=limit))
    prompts = ["a", "b [MASK] c a b", "c c [MASK]", "a b c a b c a [MASK] [MASK]"]
    arguments = {"gen_length": 10, "block_length": 4, "num_inference_steps": steps or STEPS[kind]}
    together = pipe(prompts, generator=one_each(4), **arguments)
    for i, prompt in enumerate(prompts):
        alone = pipe(prompt, generator=[seeded(i)], **arguments)
        assert lists(alone)[0] == lists(together)[i]
        assert alone.texts[0] == together.texts[i]


def test_the_progress_bar_reaches_its_end_in_blocks(capsys):
    pipe = build()
    pipe.set_progress_bar_config(disable=False)
    out = pipe(gen_length=20, block_length=4, generator=seeded(1))
    assert len(out.sequences[0]) < 22  # it ended early
    assert "20/20" in capsys.readouterr().err


# --- Beyond the model's positions ---


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_text_longer_than_the_model(kind, family):
    model = family_model(family)
    limit = 31 if family == "prefix" else 32
    pipe = build(kind, model)
    seen = passes_of(model)
    embedded = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: embedded.append(out.shape[1]))
    out = pipe(
        gen_length=100, block_length=5, suppress_tokens=[SEP], return_trajectory=True, generator=seeded(), top_k=3
    )
    sequence, trajectory = lists(out)[0], out.trajectory[0]
    assert len(sequence) == 102
    assert set(sequence[1:-1]) <= set(WORDS)
    assert (sequence[0], sequence[-1]) == (CLS, SEP)
    assert max(embedded) <= limit
    canvas = [CLS, *[MASK] * 100, SEP]
    for step, (window,) in enumerate(seen):
        now = replayed(canvas, trajectory, before=step)
        block = (now.index(MASK) - 1) // 5
        end = 1 + 5 * (block + 1)
        first = max(1, end - (limit - 1))  # as much context as fits
        assert window == [CLS, *now[first : first + limit - 1]]
        if kind != "remdm":
            assert all(old in (MASK, new) for old, new in zip(window, [CLS, *sequence[first:]]))
    assert len(seen) >= 20
    assert seen[-1][0][1] != MASK


def windowed_law_by_hand(model, canvas, column, limit):
    """What MDLM's semi-autoregressive decoding sees with a stride of 1."""
    first = max(1, column + 1 - (limit - 1))
    window = [CLS, *canvas[first : first + limit - 1]]
    return window, column - first + 1


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("prompt", ["", "a c", "a b c a c c b a b [MASK] c"])
@pytest.mark.parametrize("kind", ["linear", "confidence"])
def test_greedy_long_text_equals_a_loop_by_hand(kind, prompt, scale):
    if scale != 1 and not prompt:
        return
    model = toy_model(max_position_embeddings=8)
    out = build(kind, model)(
        prompt,
        gen_length=20,
        block_length=1,
        temperature=0.0,
        suppress_tokens=[SEP],
        guidance_scale=scale,
        generator=seeded(),
    )
    ids = toy_tokenizer()(prompt).input_ids
    canvas = start_canvas(ids, 20)
    unguided = [MASK if i in generated_columns(ids, 20) or x in WORDS else x for i, x in enumerate(canvas)]
    while MASK in canvas:
        column = canvas.index(MASK)
        logits = [
            raw_logits(model, window)[at]
            for window, at in (windowed_law_by_hand(model, row, column, 8) for row in (canvas, unguided))
        ]
        guided = logits[1] + scale * (logits[0] - logits[1])
        canvas[column] = unguided[column] = WORDS[guided[WORDS].argmax()]
    assert lists(out)[0] == canvas


@pytest.mark.parametrize("kind", ["linear", "spindle"])
def test_long_text_follows_the_law_of_its_windows(kind):
    model = toy_model(max_position_embeddings=3)
    out = build(kind, model)(
        gen_length=3, block_length=1, num_texts_per_prompt=SAMPLES // 2, generator=seeded(), output_type="seq"
    )
    law = left_to_right_law(model, 3, see=lambda canvas, column: windowed_law_by_hand(model, canvas, column, 3))
    assert_follows([sequence[1:] for sequence in lists(out)], law)


def models_of_two_limits(small, large):
    """Two models that differ in the positions which they have."""
    model = toy_model(max_position_embeddings=large)
    state = model.state_dict()
    name = "bert.embeddings.position_embeddings.weight"
    shorter = DiffusionBertForMaskedDiffusion(toy_config(max_position_embeddings=small)).eval()
    shorter.load_state_dict({**state, name: state[name][:small]})
    return shorter, model


def test_text_that_needs_no_window_does_not_depend_on_the_limit(kind):
    arguments = {"gen_length": 14, "block_length": 4, "suppress_tokens": [SEP]}
    texts = [
        lists(build(kind, model)(**arguments, generator=seeded(), num_texts_per_prompt=3))
        for limits in ((16, 64), (12, 64))
        for model in models_of_two_limits(*limits)
    ]
    assert texts[0] == texts[1] == texts[3]
    assert texts[2] != texts[3]  # here it needs one


def test_a_prompt_longer_than_the_window(pipe):
    pipe.model = model = toy_model(max_position_embeddings=16)
    words = " ".join("abccba"[i % 5] for i in range(50))
    ids = pipe.tokenizer(words).input_ids
    seen = passes_of(model)
    out = pipe(words, gen_length=20, block_length=5, suppress_tokens=[SEP], generator=seeded())
    sequence = lists(out)[0]
    assert sequence[:51] == ids[:51]
    assert len(sequence) == 72
    assert MASK not in sequence
    assert seen[0][0] == [CLS, *ids[41:51], *[MASK] * 5]  # 15 tokens up to the end of the block
    assert out.texts[0].startswith(words)


def test_far_gaps_in_a_long_prompt(pipe):
    pipe.model = toy_model(max_position_embeddings=16)
    words = " ".join("abccba"[i % 5] for i in range(40))
    prompt = f"[MASK] {words} [MASK] [MASK] {words} [MASK]"
    sequence = lists(pipe(prompt, block_length=1, generator=seeded()))[0]
    ids = pipe.tokenizer(prompt).input_ids
    assert all(new in WORDS if old == MASK else new == old for new, old in zip(sequence, ids))
    calls = passes_of(pipe.model)
    with pytest.raises(ValueError, match="`block_length` 2 .*16"):
        pipe(prompt, block_length=2)
    assert calls == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_does_not_fit_is_named_before_any_work(family):
    model = family_model(family)
    limit = 31 if family == "prefix" else 32
    pipe = build(model=model)
    calls = passes_of(model)
    with pytest.raises(ValueError, match=f"`gen_length` 100.*at most {limit}"):
        pipe(gen_length=100)
    with pytest.raises(ValueError, match=f"`block_length` {limit} .*at most {limit}"):
        pipe(gen_length=100, block_length=limit)
    for block_length in (0, -1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="`block_length` must be an integer >= 1"):
            pipe(gen_length=4, block_length=block_length)
    assert calls == []
    out = pipe(gen_length=100, block_length=limit - 1, generator=seeded(), suppress_tokens=[SEP])
    assert len(out.sequences[0]) == 102
    assert len(pipe(gen_length=limit - 2, block_length=500, suppress_tokens=[SEP]).sequences[0]) == limit


def test_long_rows_without_a_start_token(pipe):
    """Ids that a caller gives as they are: the window then has no anchor."""
    pipe.model = toy_model(max_position_embeddings=12)
    ids = torch.tensor([5, 6, 7, 7, 6] * 6)
    seen = passes_of(pipe.model)
    out = pipe(input_ids=ids, gen_length=10, block_length=4, suppress_tokens=[SEP], generator=seeded())
    sequence = lists(out)[0]
    assert sequence[:30] == ids.tolist()
    assert len(sequence) == 40
    assert MASK not in sequence
    assert seen[0][0] == [*ids[22:].tolist(), *[MASK] * 4]


def test_a_tokenizer_without_a_start_token(kind):
    """Texts are nothing but their tokens, and windows have no anchor."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["<pad>", "</s>", "?", "a", "<mask>", *"bcd"])}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    pipe = build(kind, toy_model(max_position_embeddings=12), tokenizer)
    seen = passes_of(pipe.model)
    out = pipe("a b", gen_length=30, block_length=4, eos_penalty=INF, generator=seeded())
    assert len(lists(out)[0]) == 32
    assert max(len(row) for rows in seen for row in rows) == 12
    assert out.texts[0].startswith("a b ")


def test_a_finished_long_row_beside_one_with_gaps(pipe):
    pipe.model = toy_model(max_position_embeddings=12)
    long, short = " ".join(["a b c"] * 10), "a [MASK] [MASK] b"
    out = pipe([long, short], block_length=1, generator=one_each(2))
    assert lists(out)[0] == pipe.tokenizer(long).input_ids
    assert lists(out)[1] == lists(pipe(short, block_length=1, generator=[seeded(1)]))[0]


@pytest.mark.parametrize("settings", [{"spindle_mean": "sentence"}, {"tilt": False}], ids=str)
@pytest.mark.parametrize("kind", ["spindle", "remdm"])
def test_other_spindles_write_in_windows(kind, settings):
    pipe = build(kind, toy_model(max_position_embeddings=12), **SPINDLE, **settings)
    out = pipe("a b", gen_length=30, block_length=5, eos_penalty=INF, num_texts_per_prompt=3, generator=seeded())
    assert all(len(sequence) == 34 and set(sequence[1:-1]) <= set(WORDS) for sequence in lists(out))


# --- Callbacks in blocks and windows ---


@pytest.mark.parametrize("steps", [None, 2])
def test_callbacks_get_what_they_are_promised_in_windows(kind, steps):
    model = toy_model(max_position_embeddings=16)
    pipe = build(kind, model)
    seen, calls = [], passes_of(model)
    names = list(pipe._callback_tensor_inputs)
    prompts = ["a [MASK] b", "a b c " * 12 + "[MASK] a [MASK] [MASK] b"]

    def callback(pipe, step, timestep, callback_kwargs):
        assert pipe.scheduler is not None
        assert len(calls) == step + 1  # after each forward pass
        seen.append((step, timestep, callback_kwargs))
        return callback_kwargs

    out = pipe(
        prompts,
        block_length=2,
        num_inference_steps=steps or STEPS[kind],
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=names,
        generator=seeded(),
    )
    assert [step for step, _, _ in seen] == list(range(len(calls)))
    ids = [pipe.tokenizer(prompt).input_ids for prompt in prompts]
    for (_, timestep, tensors), passed in zip(seen, calls):
        assert list(tensors) == names
        assert timestep.shape == (2,)
        assert ((timestep >= 0) & (timestep <= 1)).all()
        sample, attention_mask, positions = (tensors[name] for name in names[:3])
        assert {x.device.type for x in (sample, attention_mask, positions, timestep)} == {"cpu"}
        assert sample.shape == attention_mask.shape
        assert sample.shape[0] == 2
        assert sample.shape[1] <= 16
        assert attention_mask.tolist() == [[1] * 5 + [0] * (sample.shape[1] - 5), [1] * sample.shape[1]]
        assert tensors["logits"].shape == (len(positions), 8)
        rows = positions // sample.shape[1]
        assert (timestep[rows] > 0).all()
        assert sample[1, 0] == CLS
        if kind != "spindle":  # which may run its head only
            for row, before in zip(rows.unique().tolist(), passed):
                changed = [i for i, (x, y) in enumerate(zip(before, sample[row].tolist())) if x != y]
                asked = (positions[rows == row] % sample.shape[1]).tolist()
                assert set(changed) <= set(asked) or kind == "remdm"
                assert all(before[i] == MASK for i in asked)
        assert sample[0, [0, 1, 3, 4]].tolist() == [CLS, 5, 6, SEP]
    for sequence, row in zip(lists(out), ids):
        assert all(new in WORDS if old == MASK else new == old for new, old in zip(sequence, row))


def test_a_callback_writes_on_the_window(pipe):
    pipe.model = toy_model(max_position_embeddings=12)

    def callback(pipe, step, timestep, callback_kwargs):
        sample = callback_kwargs["sample"]
        return {"sample": sample.masked_fill(sample == MASK, 7)}

    out = pipe(
        ["a", "b c c"],
        gen_length=30,
        block_length=5,
        suppress_tokens=[SEP],
        callback_on_step_end=callback,
        return_trajectory=True,
        generator=seeded(),
    )
    for prompt, sequence, trajectory in zip(["a", "b c c"], lists(out), out.trajectory):
        ids = pipe.tokenizer(prompt).input_ids
        assert sequence[: len(ids) - 1] == ids[:-1]
        assert len(sequence) == len(ids) + 30
        assert MASK not in sequence
        assert sequence.count(7) > 15
        assert replayed(start_canvas(ids, 30), trajectory) == sequence


def test_a_callback_may_end_a_text(pipe):
    def callback(pipe, step, timestep, callback_kwargs):
        sample = callback_kwargs["sample"].clone()
        sample[0, 3] = SEP
        return {"sample": sample}

    out = pipe(
        ["a", "b"],
        gen_length=12,
        block_length=4,
        suppress_tokens=[SEP],
        callback_on_step_end=callback,
        generator=seeded(),
    )
    assert [len(sequence) for sequence in out.sequences] == [4, 15]
    assert len(out.texts[0].split()) == 2


def test_callback_objects_of_diffusers_work_in_blocks(pipe):
    class Counting(PipelineCallback):
        steps = []

        @property
        def tensor_inputs(self):
            return ["sample", "positions"]

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            assert list(callback_kwargs) == ["sample", "positions"]
            self.steps.append(step_index)
            return callback_kwargs

    Counting.steps = []
    pipe(
        gen_length=9,
        block_length=4,
        callback_on_step_end=Counting(cutoff_step_ratio=None, cutoff_step_index=1),
        generator=seeded(),
    )
    assert Counting.steps == list(range(len(Counting.steps)))
    assert len(Counting.steps) > 1
