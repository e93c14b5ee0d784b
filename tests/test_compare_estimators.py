"""The comparison of estimators on a toy: all that are bounds agree, and what is said of their scatter is so."""

import sys
from pathlib import Path

import pytest
import torch
from toys import CLS, COUNTS, SEP, toy_model, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline

sys.path.insert(0, str(Path(__file__).parents[1] / "utils"))
from compare_estimators import compare


@pytest.fixture(scope="module")
def results():
    pipe = TextDiffusionPipeline(toy_model(), toy_tokenizer(), AbsorbingStateScheduler(token_counts=COUNTS))
    rows = torch.tensor([[CLS, 5, 7, 7, 6, SEP], [CLS, 7, 6, 7, 7, 7]])
    return compare(pipe, rows, repeats=600, num_draws=4)


def test_estimators_of_a_bound_agree(results):
    for schedule, best in (
        ("linear", "counts in opposite pairs, control"),
        ("spindle", "in opposite pairs, control"),
    ):
        of_schedule = {row["estimator"]: row for row in results if row["schedule"] == schedule}
        reference = of_schedule.pop(best)
        others = [row for name, row in of_schedule.items() if "no bound" not in name and "untilted" not in name]
        assert len(others) >= 2
        for row in others:
            error = (row["error"] ** 2 + reference["error"] ** 2) ** 0.5
            assert abs(row["bound"] - reference["bound"]) < 4.5 * error, row["estimator"]


def test_what_is_no_bound_says_so_by_its_figure(results):
    uncorrected, bound = results[-1], results[-3]
    assert uncorrected["estimator"].endswith("no bound")
    assert abs(uncorrected["bound"] - bound["bound"]) > 4.5 * (uncorrected["error"] ** 2 + bound["error"] ** 2) ** 0.5


def test_passes_are_ratios_of_variances(results):
    for schedule in ("linear", "spindle"):
        of_schedule = [row for row in results if row["schedule"] == schedule]
        best = min((row for row in of_schedule if "no bound" not in row["estimator"]), key=lambda row: row["passes"])
        assert best["passes"] == 1
        for row in of_schedule:
            assert row["passes"] == pytest.approx((row["error"] / best["error"]) ** 2)


def test_opposite_pairs_of_counts_scatter_least(results):
    linear = {row["estimator"]: row["passes"] for row in results if row["schedule"] == "linear"}
    # The control is worth little after four draws of a random model.
    paired = [linear.pop("counts in opposite pairs"), linear.pop("counts in opposite pairs, control")]
    assert 2 * max(paired) < min(linear["MDLM's, cut at 1e-3"], linear["times, something masked"])
    assert max(paired) < linear["counts"]
