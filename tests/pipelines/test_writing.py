"""Blocks, windows, stopping, guidance, constraints, streams and trajectories, with every scheduler."""

import functools
import itertools
import logging
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from diffusers.callbacks import PipelineCallback
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode
from toys import (
    CLS,
    COUNTS,
    EMITTED,
    MASK,
    PAD,
    SEP,
    UNK,
    canvases,
    g_of,
    model_probabilities,
    toy_config,
    toy_model,
    toy_tokenizer,
    transition,
)
from transformers import AutoModelForMaskedLM, BertConfig, LogitsProcessor, LogitsProcessorList, RobertaConfig

from diffusers_text import (
    AbsorbingStateScheduler,
    ConfidenceUnmaskingScheduler,
    DiffusionBertForMaskedDiffusion,
    ReMDMScheduler,
    TextDiffusionPipeline,
)

SAMPLES = 20_000
WORDS = EMITTED[1:]  # what a gap can hold
INF = float("inf")
SPINDLE = {"schedule": "spindle", "token_counts": COUNTS}
SCHEDULERS = {
    "linear": (AbsorbingStateScheduler, {}),
    "spindle": (AbsorbingStateScheduler, SPINDLE),
    "confidence": (ConfidenceUnmaskingScheduler, {}),
    "remdm": (ReMDMScheduler, {"strategy": "rescale", "eta": 0.5}),
}
STEPS = {"linear": None, "spindle": None, "confidence": None, "remdm": 6}
FAMILIES = ["none", "layerwise", "prefix", "bert", "roberta"]


def family_model(name, seed=1, limit=32):
    """A model whose longest sequence is `limit`, one less with the prefix, and whose predictions vary."""
    if name in ("none", "layerwise", "prefix"):
        return toy_model(seed, time_conditioning=name, max_position_embeddings=limit)
    shape = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "bert": BertConfig(**shape, intermediate_size=32, max_position_embeddings=limit),
        "roberta": RobertaConfig(**shape, intermediate_size=32, max_position_embeddings=limit + 1, pad_token_id=PAD),
    }
    torch.manual_seed(seed)
    model = AutoModelForMaskedLM.from_config(configs[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.6)
    return model


def build(kind="linear", model=None, tokenizer=None, **scheduler_kwargs):
    """A pipeline of one of the `SCHEDULERS` whose calls take that one's `STEPS` unless they say otherwise."""
    scheduler_class, settings = SCHEDULERS[kind]
    scheduler = scheduler_class(**{**settings, **scheduler_kwargs})
    pipe = Writer(model or toy_model(), tokenizer or toy_tokenizer(), scheduler)
    pipe.steps = STEPS[kind]
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Writer(TextDiffusionPipeline):
    @functools.wraps(TextDiffusionPipeline.__call__)
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **{"num_inference_steps": self.steps, **kwargs})

    def stream(self, *args, **kwargs):
        return super().stream(*args, **{"num_inference_steps": self.steps, **kwargs})


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Toys gain nothing from a second one, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def one_each(count, seed=0):
    return [seeded(seed + i) for i in range(count)]


@pytest.fixture(params=SCHEDULERS)
def kind(request):
    return request.param


@pytest.fixture
def pipe(kind):
    return build(kind)


def lists(output):
    return [sequence.tolist() for sequence in output.sequences]


def passes_of(module):
    """The ids `[rows, seq]` of each coming call of a model, as lists."""
    seen = []
    module.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["input_ids"].tolist()), with_kwargs=True)
    return seen


def generated_columns(prompt_ids, gen_length):
    """Where `gen_length` new tokens stand: before the closing separator."""
    start = len(prompt_ids) - (prompt_ids[-1] == SEP)
    return range(start, start + gen_length)


def start_canvas(prompt_ids, gen_length):
    columns = generated_columns(prompt_ids, gen_length)
    return [*prompt_ids[: columns.start], *[MASK] * gen_length, *prompt_ids[columns.start :]]


def cut(sequence, generated):
    """A whole canvas up to its first new terminator."""
    ends = [i for i in generated if sequence[i] == SEP]
    return sequence[: ends[0] + 1] if ends else sequence


# --- Laws, by enumeration ---


def prediction(model, canvas, column, emitted=EMITTED, t=None, change=None):
    """p [vocab] of a model at one column of a row: softmax over `emitted`, of logits that `change` may change."""
    logits = raw_logits(model, canvas, t)[column]
    if change is not None:
        logits = change(logits)
    p = np.zeros(len(logits))
    p[emitted] = np.exp(logits[emitted] - logits[emitted].max())
    return p / p.sum()


def raw_logits(model, canvas, t=None):
    """[seq, vocab]"""
    times = {} if t is None else {"timesteps": torch.tensor([t])}
    with torch.no_grad():
        return model(input_ids=torch.tensor([canvas]), **times).logits[0].double().numpy()


def left_to_right_law(model, length, see=lambda canvas, column: (canvas, column), **kwargs):
    """Of texts written one token at a time from the left until the terminator; `see` is the model's view of a row."""
    law = {(): 1.0}
    for column in range(1, length + 1):
        grown = Counter()
        for text, mass in law.items():
            if SEP in text:
                grown[text] = mass
                continue
            canvas = [CLS, *text, *[MASK] * (length - len(text)), SEP]
            p = prediction(model, *see(canvas, column), **kwargs)
            for token in p.nonzero()[0].tolist():
                grown[(*text, token)] += mass * p[token]
        law = grown
    return {text if SEP in text else (*text, SEP): mass for text, mass in law.items()}


def any_order_law(predict, canvas):
    """Of rows filled one token at a time in random order; `predict(canvas, column)` gives p [vocab]."""
    masked = [column for column, token in enumerate(canvas) if token == MASK]
    if not masked:
        return {tuple(canvas): 1.0}
    law = Counter()
    for column in masked:
        p = predict(canvas, column)
        for token in p.nonzero()[0].tolist():
            filled = [*canvas[:column], token, *canvas[column + 1 :]]
            for text, mass in any_order_law(predict, filled).items():
                law[text] += mass * p[token] / len(masked)
    return law


def block_law(model, steps, schedule, block_length, length, midpoint=False):
    """Of texts of `length` tokens whose blocks are reverse processes of their own, until a block with a terminator."""
    states = canvases(length)
    untilted = model_probabilities(model, states)
    law = (states == MASK).all(1).astype(float)
    for start in range(0, length, block_length):
        written = np.zeros((len(states), length, 1))
        written[:, start : start + block_length] = 1
        written[(states[:, :start] == SEP).any(1)] = 0
        for i in range(steps, 0, -1):
            t, s = i / steps, (i - 1) / steps
            p = untilted * g_of(schedule, (t + s) / 2 if midpoint else t)
            p = p / p.sum(-1, keepdims=True)
            law = law @ transition(states, p * written, 1 - g_of(schedule, s) / g_of(schedule, t))
    texts = Counter()
    for state, mass in zip(states.tolist(), law.tolist()):
        if mass > 0:
            texts[tuple(cut([*state, SEP], range(length)))] += mass
    return texts


def assert_follows(found, law):
    """`found` are lists or tuples of ids, `law` maps tuples to probabilities."""
    counts = Counter(map(tuple, found))
    possible = {text: mass for text, mass in law.items() if mass > 1e-12}
    assert abs(sum(possible.values()) - 1) < 1e-6
    assert set(counts) <= set(possible)
    common = [text for text, mass in possible.items() if mass * len(found) >= 5]
    observed = [counts[text] for text in common]
    expected = [possible[text] * len(found) for text in common]
    if len(found) - sum(expected) > 1e-6:  # chi-square needs a handful in every class
        observed, expected = [*observed, len(found) - sum(observed)], [*expected, len(found) - sum(expected)]
    expected = np.array(expected) * sum(observed) / sum(expected)
    p_value = chisquare(observed, expected).pvalue
    assert p_value > 1e-4, f"p = {p_value:.2g}"


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
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("kind", ["linear", "spindle"])
def test_block_laws_hold_for_other_models_at_two_hundred_thousand_samples(kind, seed):
    model = toy_model(seed)
    for steps, block_length in ((1, 2), (4, 2), (None, 2), (2, 1)):
        out = build(kind, model)(
            gen_length=3,
            block_length=block_length,
            num_inference_steps=steps,
            num_texts_per_prompt=200_000,
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


def replayed(canvas, trajectory, before=None):
    """A canvas after the changes of a trajectory, or after those of the forward passes `before` one."""
    canvas = list(canvas)
    for step, position, token, _ in zip(*(entry.tolist() for entry in trajectory)):
        if before is None or step < before:
            canvas[position] = token
    return canvas


@pytest.mark.parametrize("family", FAMILIES)
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


# --- Stopping ---


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


# --- Guidance ---


def guided_logits(model, canvas, column, scale, given, t=None):
    unprompted = [MASK if i in given else token for i, token in enumerate(canvas)]
    prompted, unprompted = (raw_logits(model, row, t)[column] for row in (canvas, unprompted))
    return unprompted + scale * (prompted - unprompted)


@pytest.mark.parametrize("family", FAMILIES)
def test_guidance_equals_its_formula(kind, family):
    ids = [CLS, 5, SEP, UNK, MASK, 6, SEP]
    differs = 0
    for seed in range(20):
        model = family_model(family, seed)
        pipe = build(kind, model)
        t = 1.0 if family in ("layerwise", "prefix") else None
        greedy = {}
        for scale in (0.0, 0.5, 1.0, 4):
            out = pipe(
                input_ids=torch.tensor([ids]),
                temperature=0.0,
                guidance_scale=scale,
                num_inference_steps=1,
                generator=seeded(),
            )
            logits = guided_logits(model, ids, 4, scale, given=(1, 3, 5), t=t)
            greedy[scale] = WORDS[logits[WORDS].argmax()]
            assert lists(out)[0] == [CLS, 5, SEP, UNK, greedy[scale], 6, SEP]
        differs += len(set(greedy.values())) > 1
    assert differs  # otherwise the scale would be seen to do nothing


def test_guided_samples_follow_their_law(kind):
    model = toy_model(3)
    out = build(kind, model)(
        "a [MASK] b", guidance_scale=2.0, num_texts_per_prompt=SAMPLES, generator=seeded(), output_type="seq"
    )
    logits = guided_logits(model, [CLS, 5, MASK, 6, SEP], 2, 2.0, given=(1, 3))[WORDS]
    p = np.exp(logits) / np.exp(logits).sum()
    assert_follows([sequence[2:3] for sequence in lists(out)], {(token,): p[i] for i, token in enumerate(WORDS)})


def test_guidance_masks_the_prompt_and_not_what_was_written():
    """A continuation and a gap at once, one token at a time: by enumeration."""
    model = toy_model()

    def predict(canvas, column):
        logits = guided_logits(model, canvas, column, 1.8, given=(1,))
        emitted = WORDS if column == 2 else EMITTED
        p = np.zeros(8)
        p[emitted] = np.exp(logits[emitted])
        return p / p.sum()

    out = build(model=model)(
        "b [MASK]",
        gen_length=1,
        guidance_scale=1.8,
        num_texts_per_prompt=SAMPLES,
        generator=seeded(),
        output_type="seq",
    )
    assert_follows(lists(out), any_order_law(predict, [CLS, 6, MASK, MASK, SEP]))


def test_scale_one_is_no_guidance_and_costs_one_pass(pipe):
    embedded = []
    pipe.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: embedded.append(len(args[0])))
    arguments = {"prompt": ["a [MASK]", "b b"], "gen_length": 5, "block_length": 2}
    results = []
    for scale in ({}, {"guidance_scale": 1.0}, {"guidance_scale": 1}, {"guidance_scale": 1.0001}):
        embedded.clear()
        sequences = lists(pipe(**arguments, **scale, generator=one_each(2)))
        results.append((sequences, list(embedded)))
    assert results[0] == results[1] == results[2]
    assert results[3][0] == results[0][0]
    assert sum(results[3][1]) == 2 * sum(results[0][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_guided_batch_of_unequal_prompts_equals_each_alone(kind, family):
    pipe = build(kind, family_model(family))
    prompts = ["a", "b [MASK] c a b", "[MASK] c", "a b c a b c [MASK] a"]
    arguments = {"gen_length": 4, "guidance_scale": 2.5}
    for more in ({"temperature": 0.0}, {"block_length": 2}):
        together = lists(pipe(prompts, generator=one_each(4), **arguments, **more))
        for i, prompt in enumerate(prompts):
            assert lists(pipe(prompt, generator=[seeded(i)], **arguments, **more))[0] == together[i]


def test_guidance_changes_texts_and_keeps_given_ids(pipe):
    prompts = ["a [MASK] [MASK] b [MASK]", "c [MASK]"]
    texts = []
    for scale in (1.0, 4.0):
        out = pipe(prompts * 10, guidance_scale=scale, generator=one_each(20))
        for i, sequence in enumerate(lists(out)):
            ids = pipe.tokenizer(prompts[i % 2]).input_ids
            assert all(new in WORDS if old == MASK else new == old for new, old in zip(sequence, ids))
        texts.append(out.texts)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("scale", [float("nan"), -0.1, INF, -INF, True, "2", None])
def test_wrong_guidance_is_named_before_any_work(scale):
    pipe = build()
    calls = passes_of(pipe.model)
    with pytest.raises(ValueError, match="`guidance_scale` must be"):
        pipe("a [MASK]", guidance_scale=scale)
    assert calls == []


@pytest.mark.parametrize("prompt", [None, "", "[MASK] [MASK]", ["", "[MASK]"]])
def test_guidance_needs_a_prompt(prompt):
    pipe = build()
    calls = passes_of(pipe.model)
    with pytest.raises(ValueError, match="`guidance_scale` 2.*prompt"):
        pipe(prompt, gen_length=3, guidance_scale=2.0)
    assert calls == []


# --- Constraints ---


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_suppressed_tokens_never_appear(kind, steps):
    pipe = build(kind)
    arguments = {"num_inference_steps": steps or STEPS[kind], "num_texts_per_prompt": 50, "generator": seeded()}
    for suppressed in ([6], [5, 7], [5, 6, SEP]):
        for more in ({}, {"block_length": 2}):
            out = pipe("[MASK]", gen_length=5, suppress_tokens=suppressed, **more, **arguments)
            for sequence in lists(out):
                assert not set(suppressed) & set(sequence[1:-1])
                assert MASK not in sequence


def completes(sequence, words, written):
    """Whether a bad word stands in a sequence, at least one of its tokens being a new one."""
    return any(
        sequence[i : i + len(word)] == word and any(written[i : i + len(word)])
        for word in words
        for i in range(len(sequence))
    )


BAD_WORDS = [
    [[6], [5, 5]],
    [[5, 6], [6, 5, 6], [5, 5, 5], [6, 6]],
]


@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("bad_words", BAD_WORDS, ids=str)
def test_bad_words_are_never_completed(kind, bad_words, steps):
    pipe = build(kind)
    prompt = "a [MASK] [MASK] b [MASK] [MASK] b a [MASK]"
    canvas = start_canvas(pipe.tokenizer(prompt).input_ids, 8)
    unconstrained = []
    for more in ({}, {"block_length": 3}):
        arguments = {
            "prompt": prompt,
            "gen_length": 8,
            "num_inference_steps": steps or STEPS[kind],
            "num_texts_per_prompt": 25,
            **more,
        }
        out = pipe(**arguments, bad_words_ids=bad_words, generator=seeded())
        written = [token == MASK for token in canvas]
        assert not any(completes(sequence, bad_words, written) for sequence in lists(out))
        assert not any(MASK in sequence for sequence in lists(out))
        unconstrained += lists(pipe(**arguments, generator=seeded()))
    assert any(completes(sequence, bad_words, written) for sequence in unconstrained)


@pytest.mark.parametrize(
    "settings",
    [
        {"criterion": "margin"},
        {"criterion": "entropy", "position_temperature": 2.0},
        {"rule": "threshold", "threshold": 0.0},
        {"rule": "threshold", "threshold": 0.6},
        {"rule": "entropy_bound", "entropy_bound": 2.0},
    ],
    ids=str,
)
def test_bad_words_with_every_rule_of_confidence(settings):
    pipe = build("confidence", **settings)
    for bad_words in BAD_WORDS:
        out = pipe("a [MASK] [MASK] b", gen_length=9, bad_words_ids=bad_words, num_texts_per_prompt=100)
        written = [False, False, True, True, False, *[True] * 9, False]
        assert not any(completes(sequence, bad_words, written) for sequence in lists(out))


@pytest.mark.parametrize("settings", [{"strategy": s, "eta": 0.8} for s in ("cap", "rescale", "confidence", "loop")])
def test_bad_words_with_every_strategy_of_remasking(settings):
    pipe = build("remdm", **settings)
    for steps in (1, 3, 12):
        for bad_words in BAD_WORDS:
            out = pipe(
                "a [MASK] [MASK] b",
                gen_length=9,
                bad_words_ids=bad_words,
                num_texts_per_prompt=50,
                num_inference_steps=steps,
            )
            written = [False, False, True, True, False, *[True] * 9, False]
            assert not any(completes(sequence, bad_words, written) for sequence in lists(out))


@pytest.mark.parametrize("steps", [None, 1])
def test_bad_words_across_blocks_and_windows(kind, steps):
    pipe = build(kind, toy_model(max_position_embeddings=12))
    bad_words = [[5, 6], [6, 5, 6], [5, 5, 5], [6, 6], [5, *[7] * 10, 5]]
    out = pipe(
        gen_length=40,
        block_length=4,
        suppress_tokens=[SEP],
        bad_words_ids=bad_words,
        num_texts_per_prompt=20,
        num_inference_steps=steps or STEPS[kind],
        generator=seeded(),
    )
    for sequence in lists(out):
        assert len(sequence) == 42
        assert not completes(sequence, bad_words, [True] * 42)


def test_a_bad_word_that_ends_with_the_given_separator(pipe):
    out = pipe(gen_length=3, bad_words_ids=[[7, SEP], [5, SEP]], num_texts_per_prompt=300, generator=seeded())
    assert not any(completes(sequence, [[7, SEP], [5, SEP]], [True] * 5) for sequence in lists(out))


def test_bad_words_renormalise_the_prediction():
    """One token at a time: the exact conditional given that no bad word is completed."""
    model = toy_model()
    bad_words = [[5, 6], [7, 7], [6], [7, SEP, 5]]

    def predict(canvas, column):
        p = prediction(model, canvas, column)
        for token in EMITTED:
            filled = [*canvas[:column], token, *canvas[column + 1 :]]
            p[token] *= not completes(filled, bad_words, [i == column for i in range(len(canvas))])
        return p / p.sum()

    law = any_order_law(predict, [CLS, *[MASK] * 3, SEP])
    out = build(model=model)(
        gen_length=3, bad_words_ids=bad_words, num_texts_per_prompt=SAMPLES, generator=seeded(), output_type="seq"
    )
    assert_follows(lists(out), law)
    assert len(law) > 10


def random_mask(length, seed=0):
    """[length, vocab]: some of the tokens at each position, at least a word."""
    generator = seeded(seed)
    mask = torch.rand(length, 8, generator=generator) < 0.4
    mask[torch.arange(length), torch.randint(5, 8, (length,), generator=generator)] = True
    return mask


@pytest.mark.parametrize("limit", [32, 10])
@pytest.mark.parametrize("steps", [None, 2])
def test_allowed_mask_equals_its_callable(kind, steps, limit):
    pipe = build(kind, toy_model(max_position_embeddings=limit))
    prompts = ["a", "b [MASK] c"]
    mask = random_mask(17)
    arguments = {"gen_length": 12, "block_length": 4, "num_inference_steps": steps or STEPS[kind]}

    def allowed(canvas, positions):
        return mask[positions % canvas.shape[1]]

    results = []
    for rule in (mask, allowed):
        out = pipe(prompts * 10, allowed_token_ids=rule, generator=seeded(), **arguments)
        for i, sequence in enumerate(lists(out)):
            canvas = start_canvas(pipe.tokenizer(prompts[i % 2]).input_ids, 12)
            new = [column for column in range(len(sequence)) if canvas[column] == MASK]
            assert all(mask[column, sequence[column]] for column in new)
        results.append(lists(out))
    assert results[0] == results[1]


def test_the_callable_gets_coordinates_of_the_canvas(kind):
    pipe = build(kind, toy_model(max_position_embeddings=12))
    prompts = ["a b", "[MASK] c c c"]
    asked = [set(), set()]
    sequences = []

    def allowed(canvas, positions):
        assert len(canvas) == 2
        assert (canvas.flatten()[positions] == MASK).all()
        assert canvas[0, :3].tolist() == [CLS, 5, 6]
        assert canvas[1, [0, 2, 3, 4]].tolist() == [CLS, 7, 7, 7]
        for row, column in zip((positions // canvas.shape[1]).tolist(), (positions % canvas.shape[1]).tolist()):
            asked[row].add(column)
        sequences.append(canvas.clone())
        return torch.ones(len(positions), 8, dtype=torch.bool)

    out = pipe(
        prompts,
        gen_length=24,
        block_length=4,
        suppress_tokens=[SEP],
        allowed_token_ids=allowed,
        generator=seeded(),
    )
    assert asked == [set(range(3, 27)), {1, *range(5, 29)}]
    assert all(canvas.shape == sequences[0].shape for canvas in sequences)
    for canvas in sequences if kind != "remdm" else []:
        for row, sequence in zip(canvas.tolist(), lists(out)):
            assert all(old in (MASK, new) for old, new in zip(row, sequence))


class Recorder(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids.clone(), scores.clone()))
        return scores


def test_processors_see_the_ids_to_the_left_and_the_scores(kind):
    model = toy_model()
    recorder = Recorder()
    build(kind, model)("a [MASK] b [MASK]", logits_processor=LogitsProcessorList([recorder]), num_inference_steps=1)
    canvas = [CLS, 5, MASK, 6, MASK, SEP]
    logits = raw_logits(model, canvas)
    assert sorted(ids.shape[1] for ids, _ in recorder.seen) == [2, 4]
    for ids, scores in recorder.seen:
        assert ids.tolist() == [canvas[: ids.shape[1]]]
        assert scores.shape == (1, 8)
        assert np.allclose(scores[0, WORDS].numpy(), logits[ids.shape[1], WORDS], atol=1e-4)


def test_processors_see_the_whole_left_in_windows(pipe):
    pipe.model = toy_model(max_position_embeddings=12)
    recorder = Recorder()
    out = pipe(
        "a b c",
        gen_length=24,
        block_length=1,
        suppress_tokens=[SEP],
        logits_processor=LogitsProcessorList([recorder]),
        generator=seeded(),
    )
    lengths = [ids.shape[1] for ids, _ in recorder.seen]
    assert sorted(set(lengths)) == list(range(4, 28))
    assert lengths == sorted(lengths)
    for ids, _ in recorder.seen:
        assert ids[0].tolist() == lists(out)[0][: ids.shape[1]]


def test_a_processor_decides_what_is_written(pipe):
    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -INF).index_fill(-1, torch.tensor([7]), 0.0)

    out = pipe(["[MASK] a", "b"], gen_length=4, logits_processor=LogitsProcessorList([Only()]), generator=seeded())
    assert out.texts == ["c a c c c c", "b c c c c"]


def test_repetition_penalty_of_transformers(kind):
    processors = LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(4.0)])
    model = toy_model(4)
    out = build(kind, model)(
        "a c [MASK] b",
        logits_processor=processors,
        num_texts_per_prompt=SAMPLES // 10,
        generator=seeded(),
        output_type="seq",
    )

    def penalise(logits):
        logits = logits.copy()
        for token in (5, 7):  # what stands to the left
            logits[token] *= 4.0 if logits[token] < 0 else 1 / 4.0
        return logits

    p = prediction(model, [CLS, 5, 7, MASK, 6, SEP], 3, emitted=WORDS, change=penalise)
    assert_follows([sequence[3:4] for sequence in lists(out)], {(token,): p[token] for token in WORDS})
    assert abs(p - prediction(model, [CLS, 5, 7, MASK, 6, SEP], 3, emitted=WORDS)).max() > 0.05


def test_bad_words_processor_of_transformers(pipe):
    bad_words = [[5, 6], [7, 7], [6, 6, 5]]
    processors = LogitsProcessorList([transformers.NoBadWordsLogitsProcessor(bad_words, eos_token_id=SEP)])
    arguments = {"prompt": ["a", "c c"] * 30, "gen_length": 8, "block_length": 1}
    out = pipe(**arguments, logits_processor=processors, generator=seeded())
    written = [False, False, *[True] * 9]
    assert not any(completes(sequence[i % 2 :], bad_words, written) for i, sequence in enumerate(lists(out)))
    free = pipe(**arguments, generator=seeded())
    assert any(completes(sequence[i % 2 :], bad_words, written) for i, sequence in enumerate(lists(free)))


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -INF)


NOTHING_AT_4 = torch.ones(8, 8, dtype=torch.bool)
NOTHING_AT_4[4] = False
IMPOSSIBLE = {
    "suppress_tokens": WORDS,
    "bad_words_ids": [[5], [7, 6], [6], [7]],
    "allowed_token_ids": NOTHING_AT_4,
    "logits_processor": LogitsProcessorList([Nothing()]),
}


@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_constraints_name_the_position(kind, name, steps):
    pipe = build(kind)
    pipe.model.train()
    with pytest.raises(ValueError, match="constraints allow no token at position 4 of the canvas"):
        pipe(
            "a b c [MASK] a b",
            **{name: IMPOSSIBLE[name]},
            num_inference_steps=steps or STEPS[kind],
            num_texts_per_prompt=3,
        )
    assert all(module.training for module in pipe.model.modules())


def test_impossible_constraints_name_the_position_of_the_canvas_in_windows(pipe):
    pipe.model = toy_model(max_position_embeddings=12)
    mask = torch.ones(42, 8, dtype=torch.bool)
    mask[:, SEP] = False
    mask[33] = False
    with pytest.raises(ValueError, match="position 33 of the canvas"):
        pipe(gen_length=40, block_length=4, allowed_token_ids=mask, num_texts_per_prompt=2, generator=seeded())


def test_only_special_tokens_allowed_is_impossible_too(pipe):
    """What the scheduler never draws is no way out."""
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, [PAD, UNK, CLS, MASK]] = True
    with pytest.raises(ValueError, match="position [12] of the canvas"):
        pipe(gen_length=2, allowed_token_ids=mask)
    with pytest.raises(ValueError, match="position [12] of the canvas"):
        pipe(gen_length=2, suppress_tokens=WORDS, eos_penalty=INF)


def test_constraints_that_leave_the_terminator_only_end_the_text(pipe):
    out = pipe("a", gen_length=6, block_length=2, suppress_tokens=WORDS, generator=seeded())
    assert lists(out) == [[CLS, 5, SEP]]
    assert out.texts == ["a"]


def test_constraints_that_rule_nothing_out_change_nothing(pipe):
    free = lists(pipe("[MASK] a", gen_length=6, generator=seeded()))
    for rule in (
        {"suppress_tokens": []},
        {"suppress_tokens": [PAD, MASK]},
        {"bad_words_ids": []},
        {"bad_words_ids": [[5] * 30]},
        {"allowed_token_ids": torch.ones(10, 8, dtype=torch.bool)[:10]},
        {"logits_processor": LogitsProcessorList()},
        {"logits_processor": LogitsProcessorList([Recorder()])},
        {"eos_penalty": 0},
    ):
        if "allowed_token_ids" in rule:
            rule = {"allowed_token_ids": torch.ones(len(free[0]), 8, dtype=torch.bool)}
        assert lists(pipe("[MASK] a", gen_length=6, generator=seeded(), **rule)) == free


WRONG = [
    ({"eos_penalty": -0.5}, "`eos_penalty` must be .*got -0.5"),
    ({"eos_penalty": float("nan")}, "`eos_penalty` must be .*got nan"),
    ({"eos_penalty": -INF}, "`eos_penalty` must be .*got -inf"),
    ({"eos_penalty": "1"}, "`eos_penalty` must be"),
    ({"eos_penalty": None}, "`eos_penalty` must be"),
    ({"suppress_tokens": 5}, "`suppress_tokens` must be a list of ids .*got 5"),
    ({"suppress_tokens": ["a"]}, "`suppress_tokens` must be a list of ids"),
    ({"suppress_tokens": [8]}, r"`suppress_tokens` must be a list of ids in \[0, 8\), got \[8\]"),
    ({"suppress_tokens": [-1]}, "`suppress_tokens` must be a list of ids"),
    ({"suppress_tokens": [True]}, "`suppress_tokens` must be a list of ids"),
    ({"suppress_tokens": [[5]]}, "`suppress_tokens` must be a list of ids"),
    ({"bad_words_ids": [5]}, "`bad_words_ids` must be a list of non-empty lists"),
    ({"bad_words_ids": [[]]}, "`bad_words_ids` must be a list of non-empty lists"),
    ({"bad_words_ids": [[5], [8]]}, r"`bad_words_ids` must be .* in \[0, 8\)"),
    ({"bad_words_ids": "a"}, "`bad_words_ids` must be"),
    ({"bad_words_ids": ["a b"]}, "`bad_words_ids` must be"),
    ({"allowed_token_ids": [[True] * 8] * 6}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(6, 8)}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(8, dtype=torch.bool)}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(6, 9, dtype=torch.bool)}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(5, 8, dtype=torch.bool)}, "`allowed_token_ids` must .* 6 .*got 5"),
    ({"allowed_token_ids": torch.ones(1, 6, 8, dtype=torch.bool)}, "`allowed_token_ids` must be"),
    ({"logits_processor": [transformers.RepetitionPenaltyLogitsProcessor(2.0)]}, "`logits_processor` must be"),
    ({"logits_processor": transformers.RepetitionPenaltyLogitsProcessor(2.0)}, "`logits_processor` must be"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_constraints_are_named_before_any_work(arguments, message):
    pipe = build()
    calls = passes_of(pipe.model)
    with pytest.raises(ValueError, match=message):
        pipe(gen_length=4, **arguments)
    assert calls == []


WRONG_RETURNS = {
    "too many rows": lambda canvas, positions: torch.ones(len(positions) + 1, 8, dtype=torch.bool),
    "too few rows": lambda canvas, positions: torch.ones(len(positions) - 1, 8, dtype=torch.bool),
    "one row for all": lambda canvas, positions: torch.ones(1, 8, dtype=torch.bool),
    "a smaller vocabulary": lambda canvas, positions: torch.ones(len(positions), 7, dtype=torch.bool),
    "floats": lambda canvas, positions: torch.ones(len(positions), 8),
    "a list": lambda canvas, positions: [[True] * 8] * len(positions),
    "one dimension": lambda canvas, positions: torch.ones(8, dtype=torch.bool),
    "nothing": lambda canvas, positions: None,
}


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize("name", WRONG_RETURNS)
def test_what_the_callable_returns_is_checked(name, steps):
    with pytest.raises(ValueError, match="`allowed_token_ids` must return"):
        build()(gen_length=4, num_texts_per_prompt=2, allowed_token_ids=WRONG_RETURNS[name], num_inference_steps=steps)


def test_a_padded_vocabulary_takes_masks_of_the_tokenizer_s_size(pipe):
    pipe.model = toy_model(vocab_size=64)
    mask = random_mask(12)
    results = [
        lists(pipe(gen_length=10, allowed_token_ids=rule, num_texts_per_prompt=20, generator=seeded()))
        for rule in (
            mask,
            lambda canvas, positions: mask[positions % canvas.shape[1]],
        )
    ]
    assert results[0] == results[1]
    assert all(mask[i, sequence[i]] for sequence in results[0] for i in range(1, 11))
    out = pipe(gen_length=10, bad_words_ids=[[5, 6]], suppress_tokens=[7], num_texts_per_prompt=20)
    assert all(set(sequence[1:-1]) <= {SEP, 5, 6} for sequence in lists(out))
    assert not any(completes(sequence, [[5, 6]], [True] * 12) for sequence in lists(out))


def test_constraints_hold_with_guidance_and_shaping(pipe):
    mask = random_mask(12)
    out = pipe(
        "a",
        gen_length=9,
        guidance_scale=3.0,
        temperature=0.0,
        top_k=2,
        allowed_token_ids=mask,
        suppress_tokens=[SEP],
        num_texts_per_prompt=5,
    )
    assert all(mask[i, sequence[i]] for sequence in lists(out) for i in range(2, 11))


def test_constraints_and_guidance_in_half_precision(pipe):
    pipe.to(torch.bfloat16)
    mask = random_mask(12)
    out = pipe(
        "a",
        gen_length=9,
        block_length=4,
        guidance_scale=3.0,
        allowed_token_ids=mask,
        suppress_tokens=[SEP],
        eos_penalty=INF,
        logits_processor=LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.3)]),
        generator=seeded(),
    )
    assert all(mask[i, lists(out)[0][i]] for i in range(2, 11))


def test_constraints_hold_for_stock_models(kind):
    for family in ("bert", "roberta"):
        pipe = build(kind, family_model(family))
        out = pipe(
            "a",
            gen_length=20,
            block_length=6,
            suppress_tokens=[SEP],
            bad_words_ids=[[5, 6], [6, 5]],
            generator=seeded(),
        )
        assert not completes(lists(out)[0], [[5, 6], [6, 5]], [False, False, *[True] * 20, False])


# --- Streams ---


def stream_and_call(pipe, generators, **arguments):
    outputs = list(pipe.stream(**arguments, generator=generators()))
    return outputs, pipe(**arguments, generator=generators())


@pytest.mark.parametrize("settings", [{}, {"block_length": 3}, {"guidance_scale": 2.0, "block_length": 4}], ids=str)
@pytest.mark.parametrize("limit", [32, 10])
def test_a_stream_ends_with_what_the_call_gives(kind, limit, settings):
    if limit == 10 and not settings:
        return
    pipe = build(kind, toy_model(max_position_embeddings=limit))
    prompts = ["a", "b [MASK] c", "c c"]
    outputs, called = stream_and_call(
        pipe, lambda: one_each(3), prompt=prompts, gen_length=12, return_trajectory=True, **settings
    )
    assert lists(outputs[-1]) == lists(called)
    assert outputs[-1].texts == called.texts
    for streamed, whole in zip(outputs[-1].trajectory, called.trajectory):
        assert all(torch.equal(x, y) for x, y in zip(streamed, whole))
    for output in outputs:
        for i, (sequence, text) in enumerate(zip(lists(output), output.texts)):
            canvas = start_canvas(pipe.tokenizer(prompts[i]).input_ids, 12)
            assert all(old in (MASK, new) for old, new in zip(canvas, sequence))
            if "block_length" not in settings:
                assert len(sequence) == len(canvas)
            assert text.startswith(prompts[i].split()[0])


def test_outputs_of_a_stream_do_not_change_after_they_were_yielded(pipe):
    stream = pipe.stream(["a", "b b"], gen_length=8, block_length=4, generator=seeded(), return_trajectory=True)
    outputs, copies = [], []
    for output in stream:
        outputs.append(output)
        copies.append((lists(output), [len(trajectory.steps) for trajectory in output.trajectory]))
    assert MASK in copies[0][0][0]
    for output, (sequences, counts) in zip(outputs, copies):
        assert lists(output) == sequences
        assert [len(trajectory.steps) for trajectory in output.trajectory] == counts


def test_a_stream_writes_and_never_changes_what_it_has_written(pipe):
    kept = [lists(output) for output in pipe.stream(["a", "b [MASK] b"], gen_length=9, block_length=4)]
    masks = [sum(row.count(MASK) for row in rows) for rows in kept]
    assert masks[0] > 0
    assert masks[-1] == 0
    if pipe.scheduler.__class__ is ReMDMScheduler:
        return
    for before, after in zip(kept, kept[1:]):
        for old, new in zip(before, after):
            assert len(new) <= len(old)
            assert all(x in (MASK, y) for x, y in zip(old, new))


def test_trajectories_of_a_stream_replay_to_what_is_yielded(pipe):
    prompts = ["a", "b [MASK] b"]
    for output in pipe.stream(prompts, gen_length=9, block_length=4, return_trajectory=True, generator=seeded()):
        for prompt, sequence, trajectory in zip(prompts, lists(output), output.trajectory):
            canvas = start_canvas(pipe.tokenizer(prompt).input_ids, 9)
            assert replayed(canvas[: len(sequence)], trajectory) == sequence


def test_asking_for_more_changes_no_text(pipe):
    arguments = {"prompt": ["a", "[MASK] b b"], "gen_length": 9, "block_length": 4, "guidance_scale": 1.5}
    plain = lists(pipe(**arguments, generator=seeded()))
    for more in (
        {"return_trajectory": True},
        {"callback_on_step_end": lambda *_: {}},
        {"callback_on_step_end": lambda *_: None, "callback_on_step_end_tensor_inputs": ["logits", "positions"]},
    ):
        assert lists(pipe(**arguments, generator=seeded(), **more)) == plain


def test_a_stream_yields_after_each_forward_pass(pipe):
    calls = passes_of(pipe.model)
    for i, output in enumerate(pipe.stream("a", gen_length=6, block_length=3), start=1):
        assert len(calls) == i
        words = output.texts[0].split()
        assert words[0] == "a"
        assert set(words) <= {"a", "b", "c", "[MASK]"}
        assert torch.is_grad_enabled()
    assert i > 1


def test_texts_of_a_stream_show_what_is_masked():
    for output in build().stream("a [MASK] b [MASK]", generator=seeded()):
        ids = output.sequences[0].tolist()[1:-1]
        assert output.texts[0].split() == [{5: "a", 6: "b", 7: "c", MASK: "[MASK]"}[i] for i in ids]


def test_a_stream_of_ids():
    outputs = list(build().stream(gen_length=3, output_type="seq"))
    assert len(outputs) == 3
    assert all(output.texts is None and output.trajectory is None for output in outputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gen_length": 0}, "`gen_length`"),
        ({"gen_length": 300}, "`gen_length` 300"),
        ({"gen_length": 300, "block_length": 40}, "`block_length` 40"),
        ({"num_inference_steps": 0}, "`num_inference_steps`"),
        ({"guidance_scale": 2.0}, "`guidance_scale` 2.0"),
        ({"suppress_tokens": [99]}, "`suppress_tokens`"),
        ({"output_type": "pt"}, "`output_type`"),
        ({"generator": 3}, "`generator`"),
        ({"temperature": -1}, "`temperature`"),
    ],
)
def test_wrong_arguments_of_a_stream_raise_at_the_call(arguments, message):
    with pytest.raises(ValueError, match=message):
        build().stream(**{"gen_length": 4, **arguments})


def test_an_unknown_argument_of_a_stream_raises_at_the_call():
    with pytest.raises(TypeError, match="gen_len"):
        TextDiffusionPipeline.stream(build(), gen_len=4)


@pytest.mark.parametrize("how", ["close", "break", "drop", "exception", "end"])
def test_a_stream_leaves_the_model_as_it_was(pipe, how):
    pipe.model.train()
    pipe.model.bert.embeddings.eval()  # as of a frozen part
    modes = [module.training for module in pipe.model.modules()]

    def fail(pipe, step, timestep, callback_kwargs):
        if step == 1:
            raise RuntimeError("stop")

    stream = pipe.stream(gen_length=6, block_length=2, callback_on_step_end=fail if how == "exception" else None)
    assert [module.training for module in pipe.model.modules()] == modes  # nothing is run yet
    next(stream)
    if how == "close":
        stream.close()
    elif how == "break":
        for _ in stream:
            break
        del stream
    elif how == "drop":
        del stream
    elif how == "exception":
        with pytest.raises(RuntimeError, match="stop"):
            list(stream)
    else:
        list(stream)
    assert [module.training for module in pipe.model.modules()] == modes
    assert torch.is_grad_enabled()


def test_a_stream_of_a_model_in_training_uses_no_dropout(pipe):
    results = []
    for training in (False, True):
        pipe.model.train(training)
        results.append([lists(out) for out in pipe.stream("a", gen_length=8, block_length=3, generator=seeded())])
    assert results[0] == results[1]


# --- Trajectories ---


@pytest.mark.parametrize("steps", [None, 1, 4])
@pytest.mark.parametrize(
    ("limit", "settings"), [(32, {}), (32, {"block_length": 3}), (9, {"block_length": 3})], ids=str
)
def test_a_trajectory_replays_to_its_sequence(kind, limit, settings, steps):
    pipe = build(kind, toy_model(max_position_embeddings=limit))
    prompts = ["a", "b [MASK] c", "c c [MASK]", ""]
    steps = steps or STEPS[kind]
    passes = []
    out = pipe(
        prompts,
        gen_length=11,
        num_inference_steps=steps,
        num_texts_per_prompt=2,
        return_trajectory=True,
        generator=seeded(),
        callback_on_step_end=lambda pipe, step, *_: passes.append(step) or {},
        **settings,
    )
    assert len(out.trajectory) == 8
    for i, (sequence, trajectory) in enumerate(zip(lists(out), out.trajectory)):
        canvas = start_canvas(pipe.tokenizer(prompts[i // 2]).input_ids, 11)
        assert replayed(canvas[: len(sequence)], trajectory) == sequence
        assert len({len(entry) for entry in trajectory}) == 1
        assert [entry.dtype for entry in trajectory] == [torch.long] * 3 + [torch.double]
        assert (trajectory.steps.diff() >= 0).all()
        assert trajectory.steps[0] >= 0
        assert trajectory.steps[-1] <= passes[-1]
        assert (trajectory.times > 0).all()
        assert (trajectory.times <= 1).all()
        masked = [column for column in range(len(sequence)) if canvas[column] == MASK]
        positions = trajectory.positions.tolist()
        assert set(positions) == set(masked)
        if kind != "remdm":
            assert sorted(positions) == masked  # each once
            assert MASK not in trajectory.token_ids


def test_times_of_a_trajectory_fall_within_a_block(kind):
    pipe = build(kind)
    out = pipe(gen_length=12, block_length=4, suppress_tokens=[SEP], return_trajectory=True, generator=seeded())
    trajectory = out.trajectory[0]
    for block in range(3):
        times = trajectory.times[(trajectory.positions - 1) // 4 == block]
        assert (times.diff() <= 0).all()
    single = pipe(gen_length=12, block_length=4, return_trajectory=True, num_inference_steps=1).trajectory[0]
    assert set(single.times.tolist()) == {1.0}


def test_remasking_shows_in_the_trajectory():
    pipe = build("remdm", strategy="cap", eta=0.5)
    out = pipe(gen_length=12, num_inference_steps=20, return_trajectory=True, generator=seeded())
    trajectory = out.trajectory[0]
    assert MASK in trajectory.token_ids
    assert replayed([CLS, *[MASK] * 12, SEP], trajectory) == lists(out)[0]
    canvas = [CLS, *[MASK] * 12, SEP]
    for position, token in zip(trajectory.positions.tolist(), trajectory.token_ids.tolist()):
        assert canvas[position] != token  # a change each
        canvas[position] = token


def test_a_trajectory_only_when_asked_for(pipe):
    assert pipe(gen_length=3).trajectory is None
    assert len(pipe(gen_length=3, return_dict=False)) == 2
    sequences, texts, trajectory = pipe(gen_length=3, return_dict=False, return_trajectory=True)
    assert len(sequences) == len(texts) == len(trajectory) == 1


def test_a_text_without_gaps_has_an_empty_trajectory(pipe):
    out = pipe(["a b", "a [MASK]"], return_trajectory=True)
    assert [len(entry) for entry in out.trajectory[0]] == [0] * 4
    assert out.trajectory[1].positions.tolist()[0] == 2
    assert [len(entry) for entry in pipe("a b", return_trajectory=True).trajectory[0]] == [0] * 4


def test_a_trajectory_holds_what_a_callback_wrote(kind):
    pipe = build(kind)

    def callback(pipe, step, timestep, callback_kwargs):
        sample = callback_kwargs["sample"].clone()
        sample[:, 2] = 5 + step % 3
        return {"sample": sample}

    prompts = ["[MASK] a", "[MASK] b c a [MASK]", "[MASK] [MASK] [MASK] [MASK] [MASK]"]
    out = pipe(prompts, callback_on_step_end=callback, return_trajectory=True, generator=seeded())
    for prompt, sequence, trajectory in zip(prompts, lists(out), out.trajectory):
        assert replayed(pipe.tokenizer(prompt).input_ids, trajectory) == sequence
        assert (trajectory.times <= 1).all()
        if kind != "remdm":  # see below
            written = (trajectory.positions == 2) & (trajectory.times == 0)  # into a row that had been finished
            assert ((trajectory.times > 0) | written).all()


def test_a_row_that_a_callback_finished_is_left_alone(kind):
    """As it would be alone in its batch, where the loop ends: no other row wakes it."""
    pipe = build(kind)

    def callback(pipe, step, timestep, callback_kwargs):
        sample = callback_kwargs["sample"].clone()
        sample[0] = sample[0].masked_fill(sample[0] == MASK, 7)
        return {"sample": sample}

    for seed in range(5):
        arguments = {"gen_length": 8, "callback_on_step_end": callback, "return_trajectory": True}
        together = pipe(["a", "b"], generator=one_each(2, seed), **arguments)
        alone = pipe("a", generator=one_each(1, seed), **arguments)
        assert lists(alone)[0] == lists(together)[0]
        assert (together.trajectory[0].times > 0).all()


# --- The warning of many tokens a forward pass ---


def warnings_of(caplog, call):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="diffusers_text"):
        call()
    return [record.getMessage() for record in caplog.records if "forward pass" in record.getMessage()]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ({"gen_length": 16}, "16.0 "),
        ({"gen_length": 9}, "9.0 "),
        ({"gen_length": 9, "prompt": ["a", "b b b", "c"]}, "9.0 "),
        ({"gen_length": 18, "block_length": 9, "suppress_tokens": [SEP]}, "9.0 "),
        ({"gen_length": 16, "prompt": "a", "guidance_scale": 2.0}, "16.0 "),
        ({"prompt": " ".join(["[MASK]"] * 12)}, "12.0 "),
    ],
    ids=str,
)
def test_many_tokens_a_pass_are_warned_of_once_with_the_number(pipe, caplog, arguments, number):
    messages = warnings_of(caplog, lambda: pipe(**arguments, num_inference_steps=1))
    assert len(messages) == 1
    assert number in messages[0]
    messages = warnings_of(caplog, lambda: list(pipe.stream(**arguments, num_inference_steps=1)))
    assert len(messages) == 1
    assert len(warnings_of(caplog, lambda: pipe(**arguments, num_inference_steps=1))) == 1  # of each call


@pytest.mark.parametrize(
    "arguments",
    [
        {"gen_length": 8, "num_inference_steps": 1},
        {"gen_length": 8, "num_inference_steps": 1, "num_texts_per_prompt": 4},
        {"prompt": ["a", "b b"], "gen_length": 8, "num_inference_steps": 1},
        {"gen_length": 24, "block_length": 8, "num_inference_steps": 1},
        {"gen_length": 24},
        {"gen_length": 8, "num_inference_steps": 1, "prompt": "a", "guidance_scale": 3.0},
        {"prompt": "a b"},
    ],
    ids=str,
)
def test_eight_tokens_a_pass_are_not_warned_of(pipe, caplog, arguments):
    assert warnings_of(caplog, lambda: pipe(**arguments)) == []


def test_the_warning_counts_what_confidence_decides(caplog):
    pipe = build("confidence", rule="threshold", threshold=0.0)
    messages = warnings_of(caplog, lambda: pipe(gen_length=20, num_texts_per_prompt=2))
    assert len(messages) == 1
    assert "20.0 " in messages[0]
    pipe = build("confidence", rule="entropy_bound", entropy_bound=1e3)
    assert "20.0 " in warnings_of(caplog, lambda: pipe(gen_length=20))[0]
    pipe = build("confidence", rule="threshold", threshold=0.9999)
    assert warnings_of(caplog, lambda: pipe(gen_length=20)) == []


# --- Memory ---


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, views apart."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


VOCAB = 30522


def wide_model(limit=66):
    model = toy_model(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=limit
    )
    return model


def head_sizes(model):
    sizes = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    return sizes


def test_the_head_runs_in_chunks(kind):
    model = wide_model()
    pipe = build(kind, model)
    sizes = head_sizes(model)
    with Largest() as largest:
        out = pipe(
            gen_length=64, num_texts_per_prompt=8, num_inference_steps=1, generator=one_each(8), output_type="seq"
        )
    assert sum(sizes) == 8 * 64 * VOCAB
    assert max(sizes) <= 2**23
    assert largest.elements <= 2**23
    for i in range(8):  # alone, where all fits
        alone = pipe(gen_length=64, num_inference_steps=1, generator=[seeded(i)], output_type="seq")
        assert torch.equal(alone.sequences[0], out.sequences[i])


@pytest.mark.parametrize("kind", ["linear", "spindle"])
def test_exact_samplers_take_the_head_to_asked_positions_only(kind):
    model = wide_model()
    pipe = build(kind, model)
    sizes = head_sizes(model)
    with Largest() as largest:
        pipe(gen_length=24, num_texts_per_prompt=4, generator=seeded(), output_type="seq")
    assert max(sizes) <= 4 * VOCAB  # one position a row
    assert largest.elements <= 4 * VOCAB


def test_a_long_row_is_a_chunk_of_its_own(kind):
    model = wide_model(302)
    pipe = build(kind, model)
    sizes = head_sizes(model)
    pipe(gen_length=300, num_texts_per_prompt=2, num_inference_steps=1, generator=seeded(), output_type="seq")
    assert max(sizes) <= 300 * VOCAB
    assert sum(sizes) == 600 * VOCAB


def test_chunks_do_not_change_what_one_generator_draws():
    """Against a loop by hand that holds all logits at once."""
    model = wide_model()
    pipe = build("linear", model)
    out = pipe(gen_length=64, num_texts_per_prompt=8, num_inference_steps=2, generator=seeded(), output_type="seq")
    scheduler, generator = pipe.scheduler, seeded()
    sample = torch.tensor([[CLS, *[MASK] * 64, SEP]]).repeat(8, 1)
    scheduler.set_timesteps(2)
    positions, times = scheduler.next_positions(sample, generator)
    while len(positions):
        with torch.no_grad():
            logits = model(sample).logits.flatten(0, 1)[positions]
        logits[(positions % 66 == 65) | (positions % 66 == 0)] = 0
        sample = scheduler.step(logits, times, sample, positions=positions, generator=generator).prev_sample
        positions, times = scheduler.next_positions(sample, generator)
    assert torch.equal(torch.stack(out.sequences), sample)


def test_guided_and_constrained_heads_run_in_chunks_too(kind):
    model = wide_model()
    pipe = build(kind, model)
    prompts = ["a b", "c"] * 4
    arguments = {
        "gen_length": 62,
        "num_inference_steps": 1,
        "guidance_scale": 2.0,
        "bad_words_ids": [[5, 6]],
        "suppress_tokens": [7],
        "output_type": "seq",
    }
    with Largest() as largest:
        out = pipe(prompts, generator=one_each(8), **arguments)
    assert largest.elements <= 2**24  # with and without the prompt
    for i in range(3):
        alone = pipe(prompts[i], generator=[seeded(i)], **arguments)
        assert torch.equal(alone.sequences[0], out.sequences[i])


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
