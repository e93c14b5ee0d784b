"""Confidence unmasking: its laws by enumeration, and what changes what."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from strategies import (
    CRITERIA,
    IDS,
    SAMPLES,
    SCHEDULES,
    check_confidence_law,
    committed,
    confidence_law,
    confidence_of,
    entropy_of,
    far_apart,
    model_of,
    own_loop,
    random_logits,
    run,
)
from toys import EMITTED, MASK, assert_follows, canvases, seeded

from diffusers_text import ConfidenceUnmaskingScheduler

# With these the rules commit now one position, now two; see the test of the toy below.
SEED = 204
THRESHOLDS = {"probability": 0.495, "margin": 0.31, "entropy": 0.57}
BOUND = 0.73
COUNT_STEPS = [("linear", None), ("linear", 2), ("cosine", 2)]


@pytest.mark.parametrize(
    ("schedule", "steps", "criterion"),
    [
        *[(schedule, steps, "probability") for schedule, steps in COUNT_STEPS],
        ("cosine", 2, "margin"),
        ("linear", None, "margin"),
        ("linear", 2, "entropy"),
    ],
)
def test_count_follows_its_law(schedule, steps, criterion):
    check_confidence_law(SEED, steps, {"schedule": schedule, "criterion": criterion})


@pytest.mark.parametrize(("schedule", "steps"), [("linear", 1), ("cosine", 3), ("spindle", 2)])
def test_count_follows_its_law_for_other_steps(schedule, steps):
    """Of the spindle it is the part that is common to all tokens, and no tilt."""
    check_confidence_law(SEED, steps, {"schedule": schedule})


@pytest.mark.parametrize("criterion", CRITERIA)
def test_threshold_follows_its_law(criterion):
    check_confidence_law(SEED, None, {"criterion": criterion, "rule": "threshold", "threshold": THRESHOLDS[criterion]})


@pytest.mark.parametrize("criterion", CRITERIA)
def test_entropy_bound_follows_its_law(criterion):
    check_confidence_law(SEED, None, {"criterion": criterion, "rule": "entropy_bound", "entropy_bound": BOUND})


@pytest.mark.parametrize(
    ("kwargs", "steps"),
    [
        ({"criterion": "probability"}, 2),
        ({"criterion": "probability", "rule": "threshold", "threshold": 0.495}, None),
        ({"criterion": "margin", "rule": "entropy_bound", "entropy_bound": BOUND}, None),
    ],
)
def test_temperature_changes_the_candidates_and_no_confidence(kwargs, steps):
    check_confidence_law(SEED, steps, kwargs, temperature=0.5)


@pytest.mark.parametrize(
    ("kwargs", "steps"),
    [
        ({}, None),
        ({"schedule": "cosine"}, None),
        ({"criterion": "margin"}, 3),
        ({"criterion": "entropy", "rule": "entropy_bound", "entropy_bound": BOUND}, None),
        ({"rule": "threshold", "threshold": 0.495}, None),
    ],
)
def test_position_temperature_follows_its_law(kwargs, steps):
    check_confidence_law(SEED, steps, {"position_temperature": 0.7, **kwargs})


@pytest.mark.parametrize(("schedule", "steps"), [("linear", None), ("cosine", None), ("cosine", 3)])
def test_time_conditioned_models_are_told_the_time_of_the_step(schedule, steps):
    """Without steps that is where g is the share of masked positions."""
    check_confidence_law(SEED, steps, {"schedule": schedule}, length=2, conditioning="layerwise")


def test_shares_are_those_of_the_masks_that_the_process_began_with():
    check_confidence_law(SEED, 2, {"schedule": "linear"}, start=[MASK, 6, MASK], emitted=EMITTED[1:])


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize(
    ("schedule", "steps", "begun_with", "time"),
    [("linear", 2, 2, 1.0), ("linear", 4, 4, 0.5), ("linear", None, 4, 0.5), ("cosine", None, 4, 1 / 3)],
)
def test_of_two_positions_one_wins_by_a_logistic_law(schedule, steps, begun_with, time, temperature):
    """log c1 - log c2 + tau t (Gumbel - Gumbel) > 0 has the probability logistic((log c1 - log c2) / (tau t))."""
    p = np.array([[0, 0, 0, 0.6, 0, 0.2, 0.1, 0.1], [0, 0, 0, 0.3, 0, 0.5, 0.1, 0.1]])
    first, second = (confidence_of("margin", row, None) for row in p)
    scheduler = ConfidenceUnmaskingScheduler(
        **IDS, schedule=schedule, criterion="margin", position_temperature=temperature
    )
    scheduler.set_timesteps(steps)
    sample = torch.full((SAMPLES, 4), 5)
    sample[:, :begun_with] = MASK
    scheduler.next_positions(sample)
    sample[:, 2:] = 5  # as if two were revealed
    positions, times = scheduler.next_positions(sample)
    assert times.tolist() == pytest.approx([time] * SAMPLES)
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(p)).float().repeat(SAMPLES, 1)
    after = scheduler.step(logits, times, sample, positions=positions, generator=seeded()).prev_sample
    revealed = (after[:, :2] != MASK).numpy()
    assert (revealed.sum(1) == 1).all()
    expected = 1 / (1 + math.exp(-(math.log(first) - math.log(second)) / (temperature * time)))
    assert abs(revealed[:, 0].mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / SAMPLES)


def test_the_toy_makes_the_rules_choose():
    """Numbers of committed positions vary, and criteria, schedules, numbers of steps and temperatures differ."""
    model = model_of(SEED)
    for criterion in CRITERIA:
        for rule in (
            {"rule": "threshold", "threshold": THRESHOLDS[criterion]},
            {"rule": "entropy_bound", "entropy_bound": BOUND},
        ):
            sizes = {}
            confidence_law(model, 3, criterion=criterion, sizes=sizes, **rule)
            assert min(sizes[2, 1], sizes[2, 2]) > 0.1
    groups = [
        [{"criterion": c, "schedule": schedule, "steps": steps} for c in CRITERIA for schedule, steps in COUNT_STEPS],
        [{"criterion": c, "rule": "threshold", "threshold": 0.495} for c in CRITERIA],
        [{"criterion": c, "rule": "entropy_bound", "entropy_bound": BOUND} for c in CRITERIA],
        [{}, {"temperature": 0.5}, {"position_temperature": 0.7}],
    ]
    for group in groups:
        laws = [confidence_law(model, 3, **kwargs) for kwargs in group]
        for one, other in itertools.permutations(laws, 2):
            assert far_apart(one, other)


@pytest.mark.parametrize("kwargs", [{}, {"position_temperature": 0.7, "schedule": "cosine"}])
def test_own_loop_of_confidence_unmasking_follows_the_same_law(kwargs):
    found = own_loop(ConfidenceUnmaskingScheduler(**IDS, **kwargs), model_of(SEED), 3, 3)
    assert_follows(found, confidence_law(model_of(SEED), 3, 3, **kwargs), canvases(3))


# --- What changes what ---


def probabilities_of(logits):
    weights = logits.double().exp().numpy()
    weights[..., [0, 1, 2, MASK]] = 0
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("criterion", ["margin", "entropy"])
def test_the_order_of_positions_does_not_change_with_temperature(criterion):
    logits = random_logits(1, 30)
    p = probabilities_of(logits)[0]
    confidence = [confidence_of(criterion, row, None) for row in p]
    expected = sorted(range(30), key=lambda i: -confidence[i])
    for shaping in ({"temperature": 0.0}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 1}, {"top_p": 0.5}):
        scheduler = ConfidenceUnmaskingScheduler(**IDS, criterion=criterion)
        before, order = torch.full((1, 30), MASK), []
        for _, sample, _ in run(scheduler, before, None, logits, seeded(), **shaping):
            order += ((sample != MASK) & (before == MASK))[0].nonzero().flatten().tolist()
            before = sample
        assert order == expected


def first_step(scheduler, logits, temperature):
    """The candidates of each row, and the row after a step that may keep them."""
    scheduler.set_timesteps(None)
    sample = torch.full(logits.shape[:2], MASK)
    positions, times = scheduler.next_positions(sample)
    asked = logits.flatten(0, 1)
    output = scheduler.step(asked, times, sample, positions=positions, generator=seeded(), temperature=temperature)
    return zip(output.pred_original_sample, output.prev_sample, strict=True)


@pytest.mark.parametrize("position_temperature", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_threshold_commits_what_passes_it_and_at_least_one(criterion, temperature, position_temperature):
    """And neither temperature is seen by the threshold: confidences are those of the candidates under p."""
    logits = random_logits(300, 9)
    p = probabilities_of(logits)
    seen = set()
    for threshold in (0.0, 0.3, 0.8, 0.999):
        scheduler = ConfidenceUnmaskingScheduler(
            **IDS,
            criterion=criterion,
            rule="threshold",
            threshold=threshold,
            position_temperature=position_temperature,
        )
        for row, (candidates, after) in enumerate(first_step(scheduler, logits, temperature)):
            confidence = [confidence_of(criterion, p[row, i], candidates[i]) for i in range(9)]
            above = [i for i in range(9) if confidence[i] > threshold]
            kept = (after != MASK).nonzero().flatten().tolist()
            assert all(after[i] == candidates[i] for i in kept)
            if above:
                assert kept == above
            elif position_temperature == 0:
                assert kept == [int(np.argmax(confidence))]
            else:
                assert len(kept) == 1
            seen.add(min(len(above), 2))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_entropy_bound_keeps_the_longest_run(criterion, temperature):
    logits = random_logits(100, 9)
    p = probabilities_of(logits)
    entropy = [[entropy_of(row) for row in rows] for rows in p]
    for bound in (0.0, 0.2, 0.6, 1.5, 100.0):
        scheduler = ConfidenceUnmaskingScheduler(**IDS, criterion=criterion, rule="entropy_bound", entropy_bound=bound)
        sizes = set()
        for row, (candidates, after) in enumerate(first_step(scheduler, logits, temperature)):
            confidence = [confidence_of(criterion, p[row, i], candidates[i]) for i in range(9)]
            order = sorted(range(9), key=lambda i: -confidence[i])
            kept = committed("entropy_bound", order, confidence, entropy[row], None, None, bound)
            assert sorted(kept) == (after != MASK).nonzero().flatten().tolist()
            sizes.add(len(kept))
        assert sizes == {9} if bound == 100 else sizes == {1} if bound == 0 else len(sizes) > 1


def test_what_equals_a_limit_is_not_above_it():
    """A margin of 0 is not above 0, and a sum of entropies of 0 is not, either: such tokens are certain."""
    scheduler = ConfidenceUnmaskingScheduler(**IDS, criterion="margin", rule="threshold", threshold=0.0)
    for _, after in first_step(scheduler, torch.zeros(3, 5, 8), 1.0):
        assert (after != MASK).sum() == 1
    scheduler = ConfidenceUnmaskingScheduler(**IDS, rule="entropy_bound", entropy_bound=0.0)
    logits = torch.full((3, 5, 8), -1e4)
    logits[..., 6] = 0
    for _, after in first_step(scheduler, logits, 1.0):
        assert after.tolist() == [6] * 5


def test_count_leaves_the_share_of_the_schedule():
    """floor(g(s) L) of L masked positions remain after the step to s, in rows of every length, exactly."""
    lengths = range(1, 25)
    sample = torch.full((len(lengths), max(lengths)), 5)
    for row, length in enumerate(lengths):
        sample[row, :length] = MASK
    logits = random_logits(len(lengths), max(lengths))
    for schedule, steps in itertools.product(SCHEDULES, (1, 2, 3, 7, 10, 24, 60, 1000)):
        left_after = []  # [steps][rows]
        for i in range(steps - 1, -1, -1):
            share = Fraction(i, steps)
            if schedule == "cosine":  # floor, but where the sine is rational
                share = Fraction(1, 2) if share == Fraction(1, 3) else math.sin(math.pi / 2 * share)
            left_after.append([math.floor(share * length) for length in lengths])
        scheduler = ConfidenceUnmaskingScheduler(**IDS, **SCHEDULES[schedule])
        now = [0] * len(lengths)  # steps behind each row
        before = sample
        for positions, after, times in run(scheduler, sample, steps, logits, seeded()):
            for row in range(len(lengths)):
                left = int((before[row] == MASK).sum())
                if left == 0:
                    assert times[row] == 0
                    assert not (positions // sample.shape[1] == row).any()
                    continue
                while left_after[now[row]][row] == left:  # such steps are left out
                    now[row] += 1
                assert abs(times[row].item() - (1 - now[row] / steps)) < 1e-9
                now[row] += 1
                assert int((after[row] == MASK).sum()) == left_after[now[row] - 1][row]
            before = after
        assert not (before == MASK).any()
        if steps <= 60:  # a loop of one's own takes them all
            scheduler.set_timesteps(steps)
            canvas = sample
            for i, t in enumerate(scheduler.timesteps):
                canvas = scheduler.step(logits, t, canvas, generator=seeded()).prev_sample
                assert (canvas == MASK).sum(1).tolist() == left_after[i]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("position_temperature", [0.0, 0.7])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(
    ("kwargs", "steps"),
    [
        ({}, None),
        ({}, 2),
        ({"schedule": "cosine"}, 2),
        ({"schedule": "cosine"}, 5),
        ({"rule": "threshold", "threshold": 0.6}, None),
        ({"rule": "entropy_bound", "entropy_bound": 0.5}, None),
    ],
)
def test_confidence_laws_hold_for_more_samples(kwargs, steps, criterion, position_temperature, temperature):
    kwargs = {**kwargs, "criterion": criterion, "position_temperature": position_temperature}
    check_confidence_law(337, steps, kwargs, samples=50_000, temperature=temperature)
