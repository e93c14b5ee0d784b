"""What is loaded through `evaluate`."""

from pathlib import Path

import evaluate
import pytest

from diffusers_text import generation_metrics
from diffusers_text.evaluation.quality import rouge_l

ROUGE = Path(__file__).parents[1] / "rouge"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "metrics"))


def test_the_module_gives_the_library_s_measures():
    texts, corpus = ["a b c d e", "a b", "c c c c c"], ["a b c d f", "b", "c d"]
    module = evaluate.load(str(Path(__file__).parents[2] / "metrics" / "text_diffusion_quality"))
    assert module.compute(predictions=texts, references=corpus) == generation_metrics(texts, corpus)


@pytest.mark.parametrize("loaded", [False, True])
def test_rouge_l_is_the_mean_of_longest_common_subsequences(loaded):
    metric = evaluate.load(str(ROUGE)) if loaded else str(ROUGE)
    found = rouge_l(["a b c d", "x"], ["a c d e f", "x"], metric=metric)
    precision, recall = 3 / 4, 3 / 5
    assert found == pytest.approx((2 * precision * recall / (precision + recall) + 1) / 2)
