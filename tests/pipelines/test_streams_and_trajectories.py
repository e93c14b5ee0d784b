"""Streams and trajectories, with every scheduler."""

import itertools

import pytest
import torch
from toys import CLS, MASK, SEP, seeded, toy_model
from writing import STEPS, build, lists, one_each, passes_of, replayed, start_canvas

from diffusers_text import ReMDMScheduler, TextDiffusionPipeline

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


@pytest.mark.parametrize("lengths", [(8, 8), (8, 5)])
def test_streams_side_by_side_are_those_of_each_alone(pipe, lengths):
    def stream(i):
        return pipe.stream("a", gen_length=lengths[i], generator=seeded(i), return_trajectory=True)

    alone = [list(stream(i)) for i in range(2)]
    together = [[], []]
    for outputs in itertools.zip_longest(stream(0), stream(1)):
        pipe(gen_length=3, generator=seeded(9))  # a call in between
        for found, output in zip(together, outputs):
            found += [] if output is None else [output]
    for one, other in zip(alone, together):
        assert [output.texts for output in one] == [output.texts for output in other]
        for (times, *_), (other_times, *_) in zip(one[-1].trajectory, other[-1].trajectory):
            assert torch.equal(times, other_times)


def test_a_stream_of_a_text_without_gaps_gives_it_once(pipe):
    (output,) = pipe.stream(["a b", "c"])
    assert output.texts == pipe(["a b", "c"]).texts == ["a b", "c"]


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
