"""What is loaded through `evaluate`."""

from pathlib import Path

import evaluate
import pytest

from diffusers_text import generation_metrics
from diffusers_text.evaluation.quality import rouge_l

# Stands for the Hub's module of that name, which cannot be fetched here; the measure is the package's that it takes.
ROUGE = """
import datasets
import evaluate
from rouge_score import rouge_scorer


class Rouge(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references, rouge_types=None):
        scorer = rouge_scorer.RougeScorer(rouge_types)
        scores = [scorer.score(reference, text) for reference, text in zip(references, predictions)]
        return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in rouge_types}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "metrics"))


def test_the_module_gives_the_library_s_measures():
    texts, corpus = ["a b c d e", "a b", "c c c c c"], ["a b c d f", "b", "c d"]
    module = evaluate.load(str(Path(__file__).parents[2] / "metrics" / "text_diffusion_quality"))
    assert module.compute(predictions=texts, references=corpus) == generation_metrics(texts, corpus)


def test_rouge_l_is_the_mean_of_longest_common_subsequences(tmp_path):
    folder = tmp_path / "rouge"
    folder.mkdir()
    (folder / "rouge.py").write_text(ROUGE)
    found = rouge_l(["a b c d", "x"], ["a c d e f", "x"], module=str(folder))
    precision, recall = 3 / 4, 3 / 5
    assert found == pytest.approx((2 * precision * recall / (precision + recall) + 1) / 2)
