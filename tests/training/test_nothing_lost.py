"""Training that is killed, stopped, starved, spread over processes: what it computes stays the same."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from run_training import (
    EXAMPLE,
    checkpoints,
    finish,
    free_port,
    make_settings,
    record,
    run,
    screen,
    start,
    texts,
    wait_for,
)
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from diffusers_text import TextDiffusionPipeline
from diffusers_text.training.checkpoints import find_checkpoint

DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
# A row of its own in training data: the only one of 12 tokens.
LONG = "a b c d e f g h i j"
DISTINCT = [*sorted(set(texts(40)))[:20], LONG]


def skip_unless_cpus_resume(processes):
    if processes > 1 and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(
            "transformers before 5.24 loads the optimizer of several processes to 'cpu:0', a place torch does not know"
        )


def steps(folder, rank):
    """What a process has written down of each step: what it was trained on, and what came of it."""
    found = {}
    for entry in record(folder, rank):
        if "step" in entry:
            found.setdefault(entry["step"], []).append(entry)
    return found


def same_outcome(folder, whole, ranks=1):
    """Every step, and any repetition of it, is as in `whole`, to the last bit, and so is what is saved in the end."""
    for rank in range(ranks):
        ours, theirs = steps(folder, rank), steps(whole, rank)
        assert set(ours) == set(theirs)
        for step, entries in ours.items():
            assert entries == theirs[step] * (len(entries) // len(theirs[step])), step
    for name in ("model.safetensors", "scheduler_config.json"):
        assert (folder / "run" / name).read_bytes() == (whole / "run" / name).read_bytes(), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs with dropout that nothing happens to, each made once; they save after each epoch."""
    made = {}

    def get(processes=1, **arguments):
        key = repr((processes, arguments))
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            made[key] = run(folder, processes, model=DROPOUT, save_strategy="epoch", **arguments)
        return made[key]

    return get


# --- Killed and resumed ---

STREAM = {"streaming": True, "schedule": "linear", "max_steps": 18}
KILLED = {  # processes, arguments, saved every, killed at
    "after an epoch": (1, {}, 6, 8),
    "in an epoch": (1, {}, 4, 9),
    "group_by_length": (1, {"train_sampling_strategy": "group_by_length"}, 4, 9),
    "accumulated": (1, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 4, 9),
    "streamed": (1, STREAM, 4, 9),
    "two processes": (2, {"per_device_train_batch_size": 2}, 4, 9),
    "two processes, streamed": (2, {"per_device_train_batch_size": 2, **STREAM}, 4, 9),
}
LONGER = ["accumulated", "two processes, streamed"]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in LONGER else ()) for case in KILLED]
)
def test_after_kill_9_in_the_second_epoch_training_ends_as_if_nothing_had_happened(case, undisturbed, tmp_path):
    processes, arguments, every, killed_at = KILLED[case]
    skip_unless_cpus_resume(processes)
    saves = {"model": DROPOUT, "save_strategy": "steps", "save_steps": every}
    started = start(tmp_path, processes, trouble={"kind": "hold", "step": killed_at}, **saves, **arguments)
    wait_for(lambda: len([*tmp_path.glob("held-*")]) == processes, started)
    for process in started:
        process.kill()
    assert finish(started) == [-signal.SIGKILL] * processes
    saved_at = killed_at // every * every
    assert find_checkpoint(tmp_path / "run", True) == str(tmp_path / "run" / f"checkpoint-{saved_at}")
    run(tmp_path, processes, resume_from_checkpoint=True, **saves, **arguments)
    same_outcome(tmp_path, undisturbed(processes, **arguments), processes)
    assert len([entry for entry in record(tmp_path) if "loss" in entry]) == 18 + killed_at - saved_at


@pytest.fixture
def finished(undisturbed, tmp_path):
    """A copy of an undisturbed run, of 6 steps an epoch, to do harm to."""
    shutil.copytree(undisturbed() / "run", tmp_path / "run")
    return tmp_path


def test_a_training_that_has_ended_is_resumed_to_the_same_end(finished, undisturbed):
    run(finished, model=DROPOUT, resume_from_checkpoint=True)
    assert record(finished) == []
    for name in ("model.safetensors", "scheduler_config.json"):
        assert (finished / "run" / name).read_bytes() == (undisturbed() / "run" / name).read_bytes()


@pytest.mark.parametrize("file", ["optimizer.pt", "ema.pt"])
def test_a_checkpoint_that_kill_9_tears_is_never_resumed_from(file, undisturbed, tmp_path):
    trouble = {"kind": "die_in_save", "step": 6, "file": file}
    run(tmp_path, code=-signal.SIGKILL, model=DROPOUT, save_strategy="epoch", trouble=trouble)
    assert find_checkpoint(tmp_path / "run", True).endswith("checkpoint-6")
    run(tmp_path, model=DROPOUT, save_strategy="epoch", resume_from_checkpoint=True)
    same_outcome(tmp_path, undisturbed())
    assert sorted(os.listdir(tmp_path / "run")) == sorted(os.listdir(undisturbed() / "run"))


@pytest.mark.parametrize("limit", [None, 1], ids=["replaced", "rotated"])
def test_kill_9_while_an_old_checkpoint_is_removed_leaves_a_whole_one_to_resume_from(limit, finished):
    shutil.rmtree(finished / "run" / "checkpoint-18")
    if limit:  # what is removed is not what is replaced, but the one before
        shutil.rmtree(finished / "run" / "checkpoint-12")
    trouble = {"kind": "die_in_removal", "step": 6}
    arguments = {"model": DROPOUT, "save_strategy": "epoch", "save_total_limit": limit}
    first = str(finished / "run" / "checkpoint-6")
    run(finished, code=-signal.SIGKILL, resume_from_checkpoint=first, trouble=trouble, **arguments)
    found = Path(find_checkpoint(finished / "run", True))
    assert {"model.safetensors", "optimizer.pt", "ema.pt", "config.json"} <= set(os.listdir(found))


def test_a_checkpoint_without_a_readable_state_is_passed_over(finished):
    output_dir = finished / "run"
    assert find_checkpoint(output_dir, True) == str(output_dir / "checkpoint-18")
    (output_dir / "checkpoint-18" / "trainer_state.json").unlink()
    assert find_checkpoint(output_dir, True) == str(output_dir / "checkpoint-12")
    state = output_dir / "checkpoint-12" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:-9])
    assert find_checkpoint(output_dir, "True") == str(output_dir / "checkpoint-6")
    with pytest.raises(ValueError, match="checkpoint-12' is no whole checkpoint"):
        find_checkpoint(output_dir, str(output_dir / "checkpoint-12"))
    shutil.rmtree(output_dir / "checkpoint-6")
    with pytest.raises(ValueError, match="has no whole checkpoint"):
        find_checkpoint(output_dir, True)


# --- Stopped by SIGTERM ---


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_the_step_and_ends_well_and_training_goes_on_from_there(processes, undisturbed, tmp_path):
    skip_unless_cpus_resume(processes)
    arguments = {} if processes == 1 else {"per_device_train_batch_size": 2}
    last = processes - 1
    trouble = {"kind": "hold", "step": 7, "ranks": [last]}
    started = start(tmp_path, processes, model=DROPOUT, trouble=trouble, **arguments)
    wait_for((tmp_path / f"held-{last}").exists, started)
    os.kill(started[last].pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert finish(started) == [0] * processes, screen(tmp_path)
    assert [name for name in os.listdir(tmp_path / "run") if name != "loss.png"] == ["checkpoint-8"]
    assert [max(steps(tmp_path, rank)) for rank in range(processes)] == [8] * processes
    assert "SIGTERM" in screen(tmp_path)
    run(tmp_path, processes, model=DROPOUT, resume_from_checkpoint=True, **arguments)
    same_outcome(tmp_path, undisturbed(processes, **arguments), processes)


def torchrun(folder, **kwargs):
    path = folder / "settings.json"
    path.write_text(json.dumps(make_settings(folder, **kwargs)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    command += ["--master_port", str(free_port()), str(Path(__file__).with_name("run_training.py")), str(path)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["launcher", "worker"])
def test_under_torchrun_both_workers_stop_after_the_same_step(target, undisturbed, tmp_path):
    arguments, ranks = {"per_device_train_batch_size": 2}, [0, 1] if target == "launcher" else [1]
    trouble = {"kind": "hold", "step": 7, "ranks": ranks}
    launcher = torchrun(tmp_path, model=DROPOUT, trouble=trouble, **arguments)
    try:
        wait_for(lambda: all((tmp_path / f"held-{rank}").exists() for rank in ranks))
        worker = next(entry["pid"] for entry in record(tmp_path, 1) if "pid" in entry)
        os.kill(launcher.pid if target == "launcher" else worker, signal.SIGTERM)
        wait_for(lambda: all((tmp_path / f"signalled-{rank}").exists() for rank in ranks))
        (tmp_path / "go").touch()
        code = launcher.wait(timeout=600)
    finally:
        launcher.kill()
        launcher.wait()
    assert target == "launcher" or code == 0  # torchrun has a code of its own for a signal to itself
    assert checkpoints(tmp_path) == [8]
    assert [max(steps(tmp_path, rank)) for rank in (0, 1)] == [8, 8]
    launcher = torchrun(tmp_path, model=DROPOUT, resume_from_checkpoint=True, **arguments)
    assert launcher.wait(timeout=600) == 0, screen(tmp_path)
    same_outcome(tmp_path, undisturbed(2, **arguments), 2)


@pytest.mark.slow
def test_the_example_stops_on_sigterm_and_says_how_to_go_on(example_inputs):
    command = [
        sys.executable, str(EXAMPLE), "--model_name_or_path", "model", "--train_file", "train.txt",
        "--output_dir", "run", "--max_length", "12", "--save_steps", "5", "--max_steps", "100000",
        "--report_to", "none", "--use_cpu", "--save_total_limit", "2",
    ]  # fmt: skip
    example = subprocess.Popen(command, cwd=example_inputs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_for((example_inputs / "run" / "checkpoint-5").exists)
        example.terminate()
        said = example.communicate(timeout=600)[1].decode()
    finally:
        example.kill()
    assert example.returncode == 0, said[-2000:]
    step = int(re.search(r"Stopped at step (\d+). Go on with --resume_from_checkpoint True", said)[1])
    assert max(checkpoints(example_inputs)) == step < 100000
    assert not (example_inputs / "run" / "model.safetensors").exists()  # what is not done does not look done


# --- Spread over processes and accumulated batches ---

LAYOUTS = {  # processes, rows, accumulated batches: a step has 8 rows
    "at once": (1, 8, 1),
    "accumulated": (1, 2, 4),
    "two processes": (2, 4, 1),
    "two processes, accumulated": (2, 2, 2),
}
SETTINGS = {  # the last step has 5, 4 and 1 rows, and with 4 and 1 a process has none of them
    "none": {"rows": 21, "schedule": "linear"},
    "layerwise": {"rows": 20, "schedule": "spindle"},
    "prefix": {"rows": 17, "schedule": "cosine", "objective": "discrete"},
    "none, streamed": {"rows": 21, "schedule": "linear", "streaming": True, "max_steps": 9},
}


def run_layout(folder, name, setting, **kwargs):
    processes, size, accumulated = LAYOUTS[name]
    model = {
        "time_conditioning": setting.split(",")[0],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return run(
        folder,
        processes,
        model={"spread": 0.2, **model},
        eval_texts=texts(7, seed=1),
        per_device_train_batch_size=size,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulated,
        ddp_find_unused_parameters=False if processes > 1 else None,  # with which DDP takes none that is unused
        adam_epsilon=1e-3,  # a gradient that is zero but for rounding moves nothing
        save_strategy="steps",
        save_steps=4,
        **SETTINGS[setting],
        **kwargs,
    )


@pytest.fixture(
    scope="module", params=[pytest.param(s, marks=pytest.mark.slow if s == "prefix" else ()) for s in SETTINGS]
)
def layouts(request, tmp_path_factory):
    """The same training in each layout."""
    root = tmp_path_factory.mktemp(request.param)
    for name in LAYOUTS:
        run_layout(root / name, name, request.param)
    return root


def same_figures(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        figures = [key for key in theirs if key in ("step", "loss", "grad_norm") or "bound" in key]
        assert len(figures) >= 4
        assert {key: ours[key] for key in figures} == pytest.approx({key: theirs[key] for key in figures}, abs=1e-5)


def without_rows(folder):
    return [entry for entry in record(folder) if "rows" not in entry]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "at once"])
def test_processes_and_accumulation_change_no_figure_and_no_weight(name, layouts):
    expected = without_rows(layouts / "at once")
    assert len(expected) == 10  # 9 steps, and an evaluation
    same_figures(without_rows(layouts / name), expected)
    weights = [load_file(layouts / layout / "run" / "model.safetensors") for layout in (name, "at once")]
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layouts", ["none"], indirect=True, scope="module")
@pytest.mark.parametrize(("first", "then"), [("two processes", "accumulated"), ("at once", "two processes")])
def test_training_is_resumed_in_another_layout(first, then, layouts, tmp_path):
    skip_unless_cpus_resume(LAYOUTS[then][0])
    checkpoint = str(layouts / first / "run" / "checkpoint-4")
    run_layout(tmp_path, then, "none", resume_from_checkpoint=checkpoint)
    same_figures(without_rows(tmp_path), without_rows(layouts / "at once")[4:])


def test_what_two_processes_save_loads_plainly(layouts):
    saved = layouts / "two processes" / "run"
    model, problems = AutoModelForMaskedLM.from_pretrained(saved, output_loading_info=True)
    assert not any(problems.values())
    pipe = TextDiffusionPipeline.from_pretrained(saved)
    torch.testing.assert_close(dict(pipe.model.state_dict()), dict(model.state_dict()), atol=0, rtol=0)
    assert len(pipe(num_texts_per_prompt=2, generator=torch.Generator().manual_seed(0)).texts) == 2


# --- Starved ---


@pytest.mark.parametrize(
    ("file", "optimizer"), [("model.safetensors", "adamw_torch"), ("optimizer.pt", "adamw_torch"), ("ema.pt", "sgd")]
)
def test_a_full_disk_is_named_and_leaves_the_last_checkpoint_whole(file, optimizer, tmp_path):
    arguments = {"save_strategy": "epoch", "optim": optimizer}
    run(tmp_path, code=1, trouble={"kind": "fill_disk", "step": 6, "file": file}, **arguments)
    said = screen(tmp_path).splitlines()[-1]
    assert said.startswith(f"OSError: checkpoint-12 could not be saved in {str(tmp_path / 'run')!r}: ")
    assert os.listdir(tmp_path / "run") == ["checkpoint-6"]
    run(tmp_path, resume_from_checkpoint=True, **arguments)
    assert checkpoints(tmp_path) == [6, 12, 18]


@pytest.mark.parametrize("place", ["below a file", "/proc/run"])
def test_a_folder_that_cannot_be_written_stops_before_any_work(place, tmp_path):
    (tmp_path / "file").touch()
    output_dir = str(tmp_path / "file" / "run") if place == "below a file" else place
    run(tmp_path, code=1, output_dir=output_dir)
    assert f"OSError: `output_dir` {output_dir!r} cannot be written to: " in screen(tmp_path)
    assert record(tmp_path) == []


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_that_is_no_text_is_named(packing, tmp_path):
    run(tmp_path, code=1, rows=[None, None, 7], packing=packing)
    assert screen(tmp_path).splitlines()[-1].startswith("ValueError: Column 'text' holds no text in row 2, but 7.")


def test_empty_and_long_texts_are_counted_and_the_rest_is_trained_on(tmp_path):
    run(tmp_path, rows=["a b", "", " ", LONG, f"{LONG} k", None], num_train_epochs=1)
    assert "Left out 4 of 6 rows: without text, or longer than the `max_length` of 12 tokens." in screen(tmp_path)
    assert sorted(record(tmp_path)[0]["rows"]) == ["a b", LONG]


# --- Out of numbers ---


@pytest.mark.parametrize(("processes", "accumulated", "seed"), [(1, 1, 0), (1, 3, 1), (1, 3, 2), (2, 1, 1), (2, 2, 4)])
def test_a_loss_that_is_no_number_names_its_rows(processes, accumulated, seed, tmp_path):
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulated, "data_seed": seed}
    per_epoch = -(-len(DISTINCT) // (2 * processes * accumulated))
    trouble = {"kind": "lose_numbers", "step": per_epoch}
    run(tmp_path, processes, code=1, rows=DISTINCT, trouble=trouble, **arguments)
    [(rank, said)] = [
        (rank, line)
        for rank in range(processes)
        for line in screen(tmp_path, rank).splitlines()
        if line.startswith("FloatingPointError")
    ]
    last = record(tmp_path, rank)[-1]
    assert last["step"] > per_epoch
    assert said.startswith(f"FloatingPointError: The loss is nan in step {last['step']}. Its batch holds row ")
    numbers, named = zip(*re.findall(r"row (\d+): '([^']*)'", said))
    assert LONG in named
    assert [*named] == last["rows"] == [DISTINCT[int(number)] for number in numbers]


# --- Learnt ---


def test_four_sentences_are_learnt_by_heart(tmp_path):
    sentences = ["a e f g h", "b h g f e i", "c e e g", "d i f h e g e"]
    run(
        tmp_path,
        rows=sentences,
        model={"hidden_size": 32, "spread": 0.1},
        schedule="linear",
        max_steps=500,
        learning_rate=3e-3,
        logging_steps=100,
    )
    pipe = TextDiffusionPipeline.from_pretrained(tmp_path / "run")
    for sentence in sentences:
        first, *rest = sentence.split()
        prompt = " ".join([first] + ["[MASK]"] * len(rest))
        assert pipe(prompt, temperature=0, generator=torch.Generator().manual_seed(0)).texts == [sentence]
