"""The loop that is to be read: it learns, and says so when there is too little to learn from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import toy_config, toy_tokenizer
from transformers import BertConfig, BertForMaskedLM, set_seed

from diffusers_text import TextDiffusionPipeline, likelihood_bound

SCRIPT = Path(__file__).parents[2] / "examples" / "minimal_training_loop.py"
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true"}
OPTIONS = ["--model_name_or_path", "bert", "--output_dir", "out", "--max_length", "12", "--learning_rate", "1e-2"]


@pytest.fixture
def folder(tmp_path):
    set_seed(0)
    BertForMaskedLM(BertConfig(**{**toy_config().to_dict(), "model_type": "bert"})).save_pretrained(tmp_path / "bert")
    toy_tokenizer().save_pretrained(tmp_path / "bert")
    (tmp_path / "texts.txt").write_text("a a a b\n" * 80)
    return tmp_path


def run(folder, *options, launcher=(sys.executable,)):
    command = [*launcher, str(SCRIPT), *OPTIONS, "--train_file", "texts.txt", *map(str, options)]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)


def test_it_learns_and_leaves_a_pipeline(folder):
    result = run(folder, "--max_steps", 100, "--per_device_train_batch_size", 16)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("  * ") == 2
    pipe = TextDiffusionPipeline.from_pretrained(folder / "out")
    assert likelihood_bound(pipe, ["a a a b"] * 50).nats_per_token < 1.1  # a uniform guess among four has 1.39
    assert len(pipe(num_texts_per_prompt=3, generator=torch.Generator().manual_seed(0)).texts) == 3


def test_too_few_rows_are_an_error(folder):
    result = run(folder, "--max_steps", 2, "--per_device_train_batch_size", 64)
    assert "texts.txt makes 37 rows, fewer than 1 x --per_device_train_batch_size 64" in result.stderr


@pytest.mark.slow
def test_too_few_rows_for_all_processes_are_an_error_in_place_of_an_endless_loop(folder):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    result = run(folder, "--max_steps", 2, "--per_device_train_batch_size", 32, launcher=launcher)
    assert result.returncode != 0
    assert "texts.txt makes 37 rows, fewer than 2 x --per_device_train_batch_size 32" in result.stderr
