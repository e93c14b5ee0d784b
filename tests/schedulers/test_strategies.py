"""What all strategies of the reverse process keep: invariants, exchange of one for another, errors."""

import itertools
import logging
import math

import diffusers
import pytest
import torch
from strategies import (
    IDS,
    REMASKING,
    SPINDLE,
    STRATEGIES,
    masks,
    pipeline_of,
    random_logits,
    run,
    scheduler_of,
    steps_allowed,
    steps_for,
)
from toys import MASK, seeded, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler, TextDiffusionPipeline

# --- Invariants ---


def record(pipe, prompts, **call):
    """The pipeline's output and the canvases after each forward pass."""
    canvases_seen = []

    def callback(pipe, step, timestep, kwargs):
        canvases_seen.append(kwargs["sample"].clone())

    return pipe(prompts, callback_on_step_end=callback, output_type="seq", **call).sequences, canvases_seen


PROMPTS = ["a [MASK] b", masks(20), f"{masks(5)} c b {masks(4)} a", "[MASK] a", f"b {masks(9)} c"]


def ids_of(prompts):
    return [torch.tensor(ids) for ids in toy_tokenizer()(prompts)["input_ids"]]


@pytest.mark.parametrize(
    ("name", "steps", "block_length"),
    [(name, steps, None) for name, steps in steps_for(STRATEGIES, [1, 3, 7, 20, 100])]
    + [(name, steps, 8) for name, steps in steps_for(STRATEGIES, [1, 3, 20])]
    + [(name, 1000, None) for name in ("ancestral", "count-probability", "cap")],
)
def test_no_mask_is_left_and_given_tokens_stay(name, steps, block_length):
    """Rows of unequal length, steps and blocks that do not divide them."""
    pipe = pipeline_of(scheduler_of(name))
    sequences, seen = record(pipe, PROMPTS, num_inference_steps=steps, block_length=block_length, generator=seeded())
    rows = ids_of(PROMPTS)
    for row, sequence in zip(rows, sequences, strict=True):
        assert len(sequence) == len(row)
        assert torch.equal(sequence[row != MASK], row[row != MASK])
        assert torch.isin(sequence[row == MASK], torch.tensor([5, 6, 7])).all()
    masked_at_first = [int((row == MASK).sum()) for row in rows]
    blocks = [math.ceil(n / (block_length or n)) for n in masked_at_first]
    if steps is not None:
        assert len(seen) <= steps * max(blocks)
    if name not in REMASKING and "spindle" not in name:
        assert len(seen) <= max(masked_at_first)
    before = None
    for canvas in seen:
        for row, line in zip(rows, canvas):
            assert torch.equal(line[: len(row)][row != MASK], row[row != MASK])
        if before is not None and name not in REMASKING:
            assert ((canvas == before) | (before == MASK)).all()
        before = canvas


@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [2, 5]))
def test_blocks_are_written_one_after_another(name, steps):
    """Seven positions in blocks of three: no block is begun before, or changed after, the next one's turn."""
    pipe = pipeline_of(scheduler_of(name))
    prompts = [f"a {masks(7)}", masks(7), f"b {masks(2)} b {masks(5)} c"]
    sequences, seen = record(pipe, prompts, num_inference_steps=steps, block_length=3, generator=seeded())
    for row, (given, sequence) in enumerate(zip(ids_of(prompts), sequences, strict=True)):
        assert not (sequence == MASK).any()
        columns = (given == MASK).nonzero().flatten()
        for canvas in seen:
            begun = (canvas[row, columns] != MASK).split(3)
            last = max((i for i, block in enumerate(begun) if block.any()), default=-1)
            for i in range(last):
                assert begun[i].all()
                assert torch.equal(canvas[row, columns].split(3)[i], sequence[columns].split(3)[i])


@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [3, 11]))
def test_continuations_in_blocks_leave_no_mask(name, steps):
    pipe = pipeline_of(scheduler_of(name))
    prompts = ["a [MASK] b", "", "c"]
    out = pipe(prompts, gen_length=20, block_length=8, num_inference_steps=steps, generator=seeded())
    for row, sequence in zip(ids_of(prompts), out.sequences, strict=True):
        assert not (sequence == MASK).any()
        start = row[:-1]
        assert torch.equal(sequence[: len(start)][start != MASK], start[start != MASK])


@pytest.mark.parametrize("name", REMASKING)
def test_remdm_takes_tokens_back_but_none_of_the_prompt(name):
    pipe = pipeline_of(scheduler_of(name, eta=0.5))
    prompts = [f"a {masks(8)} b a {masks(6)} c", masks(17)]
    _, seen = record(pipe, prompts, num_texts_per_prompt=5, num_inference_steps=30, generator=seeded())
    taken_back = torch.stack([(a != MASK) & (b == MASK) for a, b in zip(seen, seen[1:])]).any(0)
    for row, ids in enumerate(ids for ids in ids_of(prompts) for _ in range(5)):
        assert taken_back[row, : len(ids)][ids == MASK].any()
        assert not taken_back[row, : len(ids)][ids != MASK].any()


def test_steps_in_which_nothing_is_revealed_cost_no_forward_pass():
    for kwargs in ({"eta": 0.0}, {"eta": 0.0, "strategy": "rescale"}):
        pipe = pipeline_of(ReMDMScheduler(**kwargs))
        _, seen = record(pipe, masks(5), num_inference_steps=1000, generator=seeded())
        assert len(seen) <= 5
    pipe = pipeline_of(ReMDMScheduler(eta=0.002))
    _, seen = record(pipe, masks(5), num_inference_steps=1000, generator=seeded())
    assert 5 < len(seen) < 200


@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [3, 9]))
def test_greedy_batch_equals_each_prompt_alone(name, steps):
    pipe = pipeline_of(scheduler_of(name))
    prompts = ["a", "b [MASK] c a b", "c c", "a b c a b c [MASK]"]
    arguments = {"gen_length": 5, "temperature": 0.0, "num_inference_steps": steps}
    together = pipe(prompts, generator=[seeded(i) for i in range(4)], **arguments)
    for i, prompt in enumerate(prompts):
        alone = pipe(prompt, generator=[seeded(i)], **arguments)
        assert alone.sequences[0].tolist() == together.sequences[i].tolist()


@pytest.mark.parametrize("block_length", [None, 4])
@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [5]))
def test_one_generator_a_row_gives_the_same_text_in_any_batch_split(name, steps, block_length):
    pipe = pipeline_of(scheduler_of(name))

    def texts(rows):
        return pipe(
            [["a", "b [MASK] c", "c c a"][i % 3] for i in rows],
            gen_length=6,
            generator=[seeded(i) for i in rows],
            num_inference_steps=steps,
            block_length=block_length,
        ).texts

    assert texts(range(6)) == texts([0]) + texts([1, 2, 3]) + texts([4, 5])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_scheduler_that_ran_before_runs_as_a_new_one(name):
    steps = 5 if steps_allowed(name)[0] else None
    scheduler, logits = scheduler_of(name), random_logits(2, 6)
    finals = []
    for sample in (torch.full((1, 6), MASK), torch.full((2, 6), MASK), torch.full((2, 6), MASK)):
        for _, after, _ in run(scheduler, sample, steps, logits[: len(sample)], seeded()):
            final = after
        finals.append(final)
    for _, after, _ in run(scheduler_of(name), torch.full((2, 6), MASK), steps, logits, seeded()):
        final = after
    assert torch.equal(finals[1], finals[2])
    assert torch.equal(finals[2], final)


# --- Loops of one's own ---


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("name", [name for name in STRATEGIES if steps_allowed(name)[0]])
def test_own_loop_leaves_no_mask(name, steps):
    scheduler, logits = scheduler_of(name), random_logits(3, 6)
    sample = torch.full((3, 6), MASK)
    sample[1, 2:4] = 6
    sample[2, :] = 5
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        output = scheduler.step(logits, t, sample, generator=seeded())
        assert not (output.pred_original_sample == MASK).any()
        sample = output.prev_sample
    assert not torch.isin(sample, torch.tensor([0, 1, 2, MASK])).any()
    assert sample[1, 2:4].tolist() == [6, 6]
    assert sample[2].tolist() == [5] * 6


@pytest.mark.parametrize("name", ["count-probability", "count-margin", "threshold", "entropy_bound"])
def test_own_loop_without_steps_leaves_no_mask(name):
    scheduler, logits = scheduler_of(name), random_logits(3, 6)
    sample = torch.full((3, 6), MASK)
    sample[1, 2:] = 6
    scheduler.set_timesteps(None)
    passes = 0
    while (sample == MASK).any():
        before = sample
        sample = scheduler.step(logits, 1.0, sample, generator=seeded()).prev_sample
        newly = ((before == MASK) & (sample != MASK)).sum(1)
        assert (newly[(before == MASK).any(1)] >= 1).all()
        assert ((sample == before) | (before == MASK)).all()
        passes += 1
    assert passes <= 6
    assert sample[1, 2:].tolist() == [6] * 4


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("sizes_of", [lambda n: [1] * n, lambda n: [n // 2, 0, n - n // 2]], ids=["ones", "halves"])
def test_pieces_of_logits_give_what_the_whole_gives(name, sizes_of):
    scheduler, logits = scheduler_of(name), random_logits(2, 6).flatten(0, 1)

    def canvases_of(pieces_of):
        sample, generator, found = torch.full((2, 6), MASK), seeded(), []
        scheduler.set_timesteps(3 if steps_allowed(name)[0] else None)
        while True:
            positions, times = scheduler.next_positions(sample, generator)
            if not len(positions):
                return found
            asked = pieces_of(logits[positions])
            output = scheduler.step(asked, times, sample, positions=positions, generator=generator)
            sample = output.prev_sample
            found += [sample.tolist(), output.pred_original_sample.tolist()]

    whole = canvases_of(lambda asked: asked)
    assert canvases_of(lambda asked: iter(asked.split(sizes_of(len(asked))))) == whole


@pytest.mark.parametrize("name", STRATEGIES)
def test_tuple_output_and_passed_logits(name):
    scheduler, logits = scheduler_of(name), random_logits(1, 3)
    scheduler.set_timesteps(2 if steps_allowed(name)[0] else None)
    sample = torch.full((1, 3), MASK)
    positions, times = scheduler.next_positions(sample, seeded())
    asked = logits.flatten(0, 1)[positions]
    output = scheduler.step(asked, times, sample, positions=positions, generator=seeded(), return_dict=False)
    assert [x.shape for x in output[:2]] == [(1, 3), (1, 3)]
    assert output[2] is asked
    assert (sample == MASK).all()


# --- Exchange ---

CLASSES = [AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler]
CHAINS = list(itertools.permutations(CLASSES))
SHARED = {**IDS, **SPINDLE, "spindle_lambda": 0.5, "corpus": "toy", "top_k": 3, "gen_length": 17, "tilt": False}
OWN = {
    AbsorbingStateScheduler: {},
    ConfidenceUnmaskingScheduler: {
        "criterion": "entropy",
        "rule": "threshold",
        "threshold": 0.4,
        "entropy_bound": 0.7,
        "position_temperature": 0.3,
    },
    ReMDMScheduler: {"strategy": "loop", "eta": 0.3, "t_on": 0.7, "t_off": 0.2, "alpha_on": 0.8},
}


@pytest.fixture
def no_warnings(caplog):
    """Fails the test when diffusers, or the library, warns."""
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield
    diffusers.utils.logging.disable_propagation()
    assert [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING] == []


def settings_of(scheduler):
    return {name: value for name, value in scheduler.config.items() if not name.startswith("_")}


def assert_has(scheduler, settings):
    assert {name: scheduler.config[name] for name in settings} == settings


def test_the_fixture_sees_what_diffusers_warns_of(caplog):
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        AbsorbingStateScheduler.from_config({**AbsorbingStateScheduler().config, "no_such_setting": 1})
    diffusers.utils.logging.disable_propagation()
    assert "no_such_setting" in caplog.text


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(c.__name__[:7] for c in chain))
def test_round_trips_through_all_classes_keep_everything(chain, no_warnings):
    first = chain[0](**SHARED, **OWN[chain[0]])
    scheduler = first
    for scheduler_class in [*chain[1:], *chain[::-1], chain[0]]:
        scheduler = scheduler_class.from_config(scheduler.config)
        assert type(scheduler) is scheduler_class
        assert_has(scheduler, SHARED)
        if scheduler_class is chain[0]:
            assert_has(scheduler, OWN[chain[0]])
        else:  # what was never said is by default
            assert_has(
                scheduler, {k: v for k, v in settings_of(scheduler_class()).items() if k in OWN[scheduler_class]}
            )
    assert settings_of(scheduler).items() >= settings_of(first).items()


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(c.__name__[:7] for c in chain))
def test_settings_said_on_the_way_are_kept(chain, no_warnings):
    scheduler = chain[0](**SHARED, **OWN[chain[0]])
    for scheduler_class in chain[1:]:
        scheduler = scheduler_class.from_config(scheduler.config, **OWN[scheduler_class])
    for scheduler_class in chain:
        scheduler = scheduler_class.from_config(scheduler.config)
        assert_has(scheduler, {**SHARED, **OWN[scheduler_class]})


def test_schedulers_know_each_other():
    for scheduler_class in CLASSES:
        assert set(scheduler_class().compatibles) == set(CLASSES)


def arguments_for(scheduler):
    """Steps that a scheduler of `OWN` takes."""
    return {"num_inference_steps": 5 if isinstance(scheduler, ReMDMScheduler) else None}


def test_strategies_of_a_pipeline_are_exchanged(no_warnings):
    pipe = pipeline_of(AbsorbingStateScheduler(**SPINDLE))
    for scheduler_class in (*CLASSES, *CLASSES[::-1]):
        pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config, **OWN[scheduler_class])
        assert_has(pipe.scheduler, {**IDS, **SPINDLE, **OWN[scheduler_class]})
        sequence = pipe("a [MASK] b", gen_length=6, **arguments_for(pipe.scheduler)).sequences[0]
        assert not (sequence == MASK).any()


@pytest.mark.parametrize("saved", CLASSES)
def test_saved_pipelines_come_back_and_every_class_loads_their_scheduler(saved, tmp_path, no_warnings):
    pipe = pipeline_of(saved(**SHARED, **OWN[saved]))
    call = {"gen_length": 6, "num_texts_per_prompt": 3, **arguments_for(pipe.scheduler)}
    texts = pipe(generator=seeded(), **call).texts
    pipe.save_pretrained(tmp_path)
    loaded = TextDiffusionPipeline.from_pretrained(tmp_path)
    assert type(loaded.scheduler) is saved
    assert settings_of(loaded.scheduler) == settings_of(pipe.scheduler)
    loaded.set_progress_bar_config(disable=True)
    assert loaded(generator=seeded(), **call).texts == texts
    for scheduler_class in CLASSES:
        for place in ((tmp_path / "scheduler", {}), (tmp_path, {"subfolder": "scheduler"})):
            scheduler = scheduler_class.from_pretrained(place[0], **place[1])
            assert type(scheduler) is scheduler_class
            assert_has(scheduler, SHARED)
        scheduler.save_pretrained(tmp_path / "again")
        assert_has(saved.from_pretrained(tmp_path / "again"), {**SHARED, **OWN[saved]})
        other = TextDiffusionPipeline.from_pretrained(tmp_path, scheduler=scheduler)
        assert type(other.scheduler) is scheduler_class


# --- Errors ---

CONFIDENCE, REMASK = ConfidenceUnmaskingScheduler, ReMDMScheduler
NO_NUMBERS = ["0.5", None, math.nan, True]


@pytest.mark.parametrize(
    ("scheduler_class", "kwargs", "message"),
    [
        (CONFIDENCE, {"criterion": "random"}, "`criterion` must be one of .*probability.* got 'random'"),
        (CONFIDENCE, {"criterion": None}, "`criterion` must be one of"),
        (CONFIDENCE, {"rule": "topk"}, "`rule` must be one of .*count.* got 'topk'"),
        (CONFIDENCE, {"threshold": 1.0}, "`threshold` must .* got 1.0"),
        (CONFIDENCE, {"threshold": -0.1}, "`threshold` must .* got -0.1"),
        (CONFIDENCE, {"entropy_bound": -1.0}, "`entropy_bound` must .* got -1.0"),
        (CONFIDENCE, {"entropy_bound": math.inf}, "`entropy_bound` must .* got inf"),
        (CONFIDENCE, {"position_temperature": -1.0}, "`position_temperature` must .* got -1.0"),
        (REMASK, {"strategy": "uniform"}, "`strategy` must be one of .*rescale.* got 'uniform'"),
        (REMASK, {"eta": 1.5}, "`eta` must .* got 1.5"),
        (REMASK, {"eta": -0.5}, "`eta` must .* got -0.5"),
        (REMASK, {"t_on": 1.0}, "t_on.* must .*got .*1.0"),
        (REMASK, {"t_off": 0.0}, "t_off.* must .*got 0.0"),
        (REMASK, {"t_on": 0.2, "t_off": 0.2}, "t_off < t_on.* must .*got 0.2 and 0.2"),
        (REMASK, {"alpha_on": 1.0}, "`alpha_on` must .* got 1.0"),
        (REMASK, {"alpha_on": 0.0}, "`alpha_on` must .* got 0.0"),
        *[
            (scheduler_class, {name: value}, f"{name}.* must .*{value}")
            for scheduler_class, names in (
                (CONFIDENCE, ["threshold", "entropy_bound", "position_temperature"]),
                (REMASK, ["eta", "t_on", "t_off", "alpha_on"]),
            )
            for name in names
            for value in NO_NUMBERS
        ],
        (CONFIDENCE, {"schedule": "sigmoid"}, "`schedule` must be one of"),
        (REMASK, {"schedule": "spindle"}, "count_tokens"),
        (CONFIDENCE, {"temperature": -1.0}, "`temperature` must be"),
        (REMASK, {"mask_token_id": -1}, "`mask_token_id` must be"),
        (CONFIDENCE, {"suppressed_token_ids": [0, -1]}, r"`suppressed_token_ids` must be .* got \[0, -1\]"),
        (AbsorbingStateScheduler, {"suppressed_token_ids": 3}, "`suppressed_token_ids` must be .* got 3"),
        (CONFIDENCE, {"spindle_lambda": "0.3"}, "`spindle_lambda` must be a number, got '0.3'"),
        (REMASK, {"power": None}, "`power` must be a number, got None"),
        (AbsorbingStateScheduler, {"sigma_min": True}, "`sigma_min` must be a number, got True"),
    ],
)
def test_wrong_settings_are_named(scheduler_class, kwargs, message):
    with pytest.raises(ValueError, match=message):
        scheduler_class(**kwargs)


def test_wrong_numbers_of_steps_are_named():
    for name in ("threshold", "entropy_bound"):
        pipe = pipeline_of(scheduler_of(name))
        with pytest.raises(ValueError, match=f"`num_inference_steps` must be None with .*{name}.* got 4"):
            pipe(gen_length=4, num_inference_steps=4)
        with pytest.raises(ValueError, match="`num_inference_steps` must be None"):
            pipe.scheduler.set_timesteps(4)
    for name in REMASKING:
        pipe = pipeline_of(scheduler_of(name))
        with pytest.raises(ValueError, match="`num_inference_steps` must be an integer >= 1"):
            pipe(gen_length=4)
        with pytest.raises(ValueError, match="`num_inference_steps` must be an integer >= 1"):
            pipe.scheduler.set_timesteps()
    for name in STRATEGIES:
        for steps in (0, -1, 3.5, True, "5"):
            with pytest.raises(ValueError, match="`num_inference_steps` must be"):
                scheduler_of(name).set_timesteps(steps)


@pytest.mark.parametrize("name", STRATEGIES)
def test_wrong_calls_are_named(name):
    scheduler = scheduler_of(name)
    sample = torch.full((2, 3), MASK)
    steps = 4 if steps_allowed(name)[0] else None
    scheduler.set_timesteps(steps)
    if steps is not None:
        with pytest.raises(ValueError, match="one of `scheduler.timesteps`"):
            scheduler.step(torch.zeros(2, 3, 8), 0.3, sample)
        with pytest.raises(ValueError, match="`logits` must have shape"):
            scheduler.step(torch.zeros(2, 4, 8), 1.0, sample)

    def step(logits, sample=sample, **kwargs):
        scheduler.set_timesteps(steps)
        positions, times = scheduler.next_positions(sample, seeded())
        return scheduler.step(logits[: len(positions)], times, sample, positions=positions, **kwargs)

    with pytest.raises(ValueError, match="`logits` hold NaN"):
        step(torch.full((6, 8), math.nan))
    with pytest.raises(ValueError, match="infinity"):
        step(torch.full((6, 8), math.inf))
    with pytest.raises(ValueError, match="nothing but -inf"):
        step(torch.full((6, 8), -math.inf))
    only_suppressed = torch.full((6, 8), -math.inf)
    only_suppressed[:, 0] = 0
    for temperature in (1.0, 0.0):
        with pytest.raises(ValueError, match="nothing but -inf"):
            step(only_suppressed, temperature=temperature)
    with pytest.raises(ValueError, match=r"`timestep` must be .* \[2\], got \[3\]"):
        scheduler.step(torch.zeros(2, 3, 8), torch.ones(3), sample)
    with pytest.raises(ValueError, match="`logits` must have"):
        step(torch.zeros(0, 8))
    with pytest.raises(ValueError, match="`top_p`"):
        step(torch.zeros(6, 8), top_p=0.0)
    with pytest.raises(ValueError, match="`temperature`"):
        step(torch.zeros(6, 8), temperature=-1.0)
    with pytest.raises(ValueError, match="LongTensor"):
        scheduler.next_positions(sample.float())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_is_played_once_and_whole(name):
    scheduler, sample = scheduler_of(name), torch.full((2, 3), MASK)
    scheduler.set_timesteps(2 if steps_allowed(name)[0] else None)
    positions, times = scheduler.next_positions(sample, seeded())
    if len(positions) > 1:
        with pytest.raises(ValueError, match="`positions` must be those of the last `next_positions`"):
            scheduler.step(torch.zeros(1, 8), times, sample, positions=positions[:1])
    scheduler.step(torch.zeros(len(positions), 8), times, sample, positions=positions, generator=seeded())
    with pytest.raises(ValueError, match="`positions` must be those of the last `next_positions`"):
        scheduler.step(torch.zeros(len(positions), 8), times, sample, positions=positions, generator=seeded())


@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [1, 4]))
def test_what_a_callback_masks_again_at_the_end_is_written_anew(name, steps):
    again = []

    def callback(pipe, step, timestep, kwargs):
        sample = kwargs["sample"].clone()
        if not (sample == MASK).any() and not again:
            again.append(sample.clone())
            sample[:, 2] = MASK
        elif again:  # what was not masked again stays
            assert torch.equal(sample[:, [1, 3, 4]], again[0][:, [1, 3, 4]])
        return {"sample": sample}

    arguments = {"gen_length": 4, "num_inference_steps": steps, "num_texts_per_prompt": 3, "generator": seeded()}
    out = pipeline_of(scheduler_of(name))(**arguments, callback_on_step_end=callback, output_type="seq")
    assert len(again) == 1
    assert not any((sequence == MASK).any() for sequence in out.sequences)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_canvas_of_another_batch_is_named(name):
    scheduler, sample = scheduler_of(name), torch.full((2, 3), MASK)
    scheduler.set_timesteps(4 if steps_allowed(name)[0] else None)
    scheduler.next_positions(sample)
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.next_positions(sample[:1])


@pytest.mark.parametrize("name", [name for name in REMASKING if "spindle" not in name] + ["count-margin"])
def test_a_canvas_of_another_batch_is_named_by_a_loop_of_ones_own(name):
    """These strategies know where they began."""
    scheduler, sample = scheduler_of(name), torch.full((2, 3), MASK)
    scheduler.set_timesteps(4)
    sample = scheduler.step(torch.zeros(2, 3, 8), 1.0, sample, generator=seeded()).prev_sample
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.step(torch.zeros(1, 3, 8), 0.75, sample[:1])
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.step(torch.zeros(4, 3, 8), 0.75, sample.repeat(2, 1))


@pytest.mark.parametrize("name", STRATEGIES)
def test_positions_that_were_not_asked_for_are_named(name):
    steps = 4 if steps_allowed(name)[0] else None
    scheduler, sample = scheduler_of(name), torch.full((1, 3), MASK)
    sample[0, 0] = 5
    scheduler.set_timesteps(steps)
    with pytest.raises(ValueError, match="`positions` must be those of the last `next_positions`"):
        scheduler.step(torch.zeros(1, 8), torch.ones(1), sample, positions=torch.tensor([1]))
    _, times = scheduler.next_positions(sample)
    with pytest.raises(ValueError, match="`positions` must be those of the last `next_positions`"):
        scheduler.step(torch.zeros(1, 8), times, sample, positions=torch.tensor([0]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_samples_of_a_wrong_kind_are_named_by_a_loop_of_ones_own(name):
    scheduler = scheduler_of(name)
    for sample in (torch.full((2, 3), float(MASK)), torch.full((3,), MASK)):
        scheduler.set_timesteps(4 if steps_allowed(name)[0] else None)
        with pytest.raises(ValueError, match="`sample` must be a LongTensor"):
            scheduler.step(torch.zeros(*sample.shape, 8), 1.0, sample)


@pytest.mark.parametrize("name", REMASKING)
def test_remdm_without_steps_names_them(name):
    """Before `set_timesteps`, too."""
    sample = torch.full((2, 3), MASK)
    with pytest.raises(ValueError, match="num_inference_steps|set_timesteps"):
        scheduler_of(name).next_positions(sample)
    with pytest.raises(ValueError, match="num_inference_steps|set_timesteps"):
        scheduler_of(name).step(torch.zeros(2, 3, 8), 1.0, sample)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STRATEGIES if steps_allowed(name)[0]])
def test_a_thousand_steps_leave_no_mask(name):
    sequences, _ = record(pipeline_of(scheduler_of(name)), PROMPTS, num_inference_steps=1000, generator=seeded())
    for row, sequence in zip(ids_of(PROMPTS), sequences, strict=True):
        assert torch.equal(sequence[row != MASK], row[row != MASK])
        assert not (sequence == MASK).any()
