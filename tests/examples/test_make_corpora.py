"""The corpora for trying the scripts, from their packages."""

import csv
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from diffusers_text import load_denoiser

SCRIPT = Path(__file__).parents[2] / "examples" / "make_corpora.py"


def test_corpora_and_model_are_what_the_scripts_take(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--output_dir", tmp_path], capture_output=True, text=True, check=True
    )
    lines = (tmp_path / "sotu.txt").read_text(encoding="utf-8").splitlines()
    assert f"{len(lines)} rows" in done.stdout
    assert len(lines) > 17_000
    assert all(line.strip() for line in lines)
    with (tmp_path / "bible.csv").open(newline="", encoding="utf-8") as file:
        header, *pairs = csv.reader(file)
    assert header == ["kjv", "web"]
    assert len(pairs) > 31_000
    assert pairs[0][1] == "In the beginning God created the heavens and the earth."
    assert all(kjv.strip() and web.strip() for kjv, web in pairs)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    assert load_denoiser(tmp_path / "bert").config.vocab_size == len(tokenizer)
