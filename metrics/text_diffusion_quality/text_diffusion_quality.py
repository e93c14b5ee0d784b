"""Quality and diversity of generated texts, as a module of `evaluate`."""

import datasets
import evaluate

from diffusers_text import generation_metrics

_DESCRIPTION = """\
BLEU-4 against a corpus and self-BLEU, distinct n-grams, repetition, entropy, share of distinct texts, lengths.
"""
_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`): generated texts, two at least.
    references (`list[str]`): as many texts of the corpus that they should be like.
Returns:
    The dictionary of `diffusers_text.generation_metrics`.
Examples:
    >>> quality = evaluate.load("metrics/text_diffusion_quality")
    >>> texts, corpus = ["we do agree.", "we agree that no is no."], ["yes, we do agree.", "no is no."]
    >>> results = quality.compute(predictions=texts, references=corpus)
    >>> results["unique"], results["length_mean"]
    (1.0, 5.5)
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class TextDiffusionQuality(evaluate.Metric):
    """The measures of generated texts that need no model."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions, references):
        return generation_metrics(predictions, references)
