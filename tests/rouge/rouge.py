"""Stands for the Hub's module of that name, which cannot be fetched here; the package does the measuring."""

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
