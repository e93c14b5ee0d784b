"""Estimates of the bound: what they are over all noise, whose noise it is, and how far off they say they are."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from exact_bounds import SHORT, SHORT_COUNTS, exact_bound
from scipy.stats import chi2, chisquare, kstest
from toys import CLS, COUNTS, MASK, PAD, SEP, toy_model, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, DataCollatorForTextDiffusion, logits_at
from diffusers_text.evaluation.estimators import (
    TokenControl,
    choose_estimator,
    corpus_error,
    draw_estimates,
    evaluation_noise,
    pair_variance,
)
from diffusers_text.losses import BoundTerms
from diffusers_text.noising import bound_terms, row_key

SIGNIFICANT = 1e-4
CASES = {
    "linear, count": ("linear", "count", None),
    "cosine, count": ("cosine", "count", None),
    "linear, nonempty": ("linear", "nonempty", None),
    "linear, independent": ("linear", "independent", None),
    "spindle, nonempty": ("spindle", "nonempty", None),
    "spindle, independent": ("spindle", "independent", None),
    "linear, 7 steps": ("linear", "nonempty", 7),
    "spindle, 7 steps": ("spindle", "nonempty", 7),
    "spindle, 7 steps, independent": ("spindle", "independent", 7),
}


def scheduler_of(schedule="linear", counts=COUNTS):
    counts = counts if schedule == "spindle" else None
    return AbsorbingStateScheduler(mask_token_id=MASK, vocab_size=8, schedule=schedule, token_counts=counts)


def estimates_of(schedule, estimator, steps, draws, salt=0, model=None):
    """Estimates of SHORT, [rows, draws], each row with noise by its place and `salt`."""
    scheduler = scheduler_of(schedule, SHORT_COUNTS)
    model = toy_model().double() if model is None else model
    batch = DataCollatorForTextDiffusion(toy_tokenizer())([{"input_ids": row} for row in SHORT])
    sample, maskable = batch["input_ids"], batch["labels"] != -100
    keys = [(i, salt) for i in range(len(SHORT))]

    @torch.no_grad()
    def terms_of(noise):
        logits = logits_at(model, noise.positions, input_ids=noise.noisy, attention_mask=batch["attention_mask"])
        return bound_terms(scheduler, logits, noise.positions, noise)

    found = draw_estimates(scheduler, sample, maskable, keys, range(draws), terms_of, estimator, steps)
    return torch.stack([nats for _, _, nats in found], dim=1).numpy()


TOKENS = sum(len(row) - 1 for row in SHORT)


@pytest.mark.parametrize("case", CASES)
def test_every_estimator_estimates_the_exact_bound(case):
    """
    Short evaluations with noise of their own: their mean is the bound by enumeration, and they scatter as much as they
    say. Eight draws each, so that later pairs have the control of the earlier ones.
    """
    schedule, estimator, steps = CASES[case]
    model, repeats = toy_model().double(), 60
    exact = exact_bound(model, scheduler_of(schedule, SHORT_COUNTS), steps)
    runs = [estimates_of(schedule, estimator, steps, 8, salt, model) for salt in range(repeats)]
    bounds = np.array([nats.mean(axis=1).sum() / TOKENS for nats in runs])
    errors = np.array([corpus_error(nats, TOKENS) for nats in runs])
    assert abs(bounds.mean() - exact) < 4 * bounds.std(ddof=1) / np.sqrt(repeats)
    # Squared errors against the variances that were said: heavy tails apart, their sum is that of a chi-square.
    if estimator != "independent":
        said, found = (errors**2).mean(), ((bounds - exact) ** 2).mean()
        low, high = chi2.ppf([1e-4, 1 - 1e-4], repeats) / repeats
        assert low * 0.8 < found / said < high * 1.25


@pytest.mark.parametrize(("schedule", "estimator"), [("linear", "count"), ("spindle", "nonempty")])
def test_the_default_scatters_less_than_mdlm_s_estimator(schedule, estimator):
    model = toy_model().double()
    variances = [
        np.mean([pair_variance(estimates_of(schedule, name, None, 8, salt, model)).sum() for salt in range(20)])
        for name in (estimator, "independent")
    ]
    assert variances[0] < variances[1] / 2


def terms_with(weights, losses, rows):
    weights, losses = torch.tensor(weights, dtype=torch.double), torch.tensor(losses, dtype=torch.double)
    return BoundTerms(weights * losses, weights, -losses, -losses, losses > 0, torch.tensor(rows))


def test_the_control_is_the_mean_of_a_token_s_earlier_losses():
    """By hand: two rows of two tokens. A pair of draws learns nothing from its own first draw."""
    noise = lambda *positions: type("Noise", (), {"positions": torch.tensor(positions)})  # noqa: E731
    control = TokenControl(torch.ones(2, 2, dtype=torch.bool))
    assert control.correct(noise(0, 1), terms_with([1.0, 1.0], [4.0, 2.0], [0, 0])).tolist() == [0, 0]
    assert control.correct(noise(1, 3), terms_with([2.0, 2.0], [6.0, 5.0], [0, 1])).tolist() == [0, 0]
    # Means are 4 and (2 + 6) / 2 in the first row; in the second only its second token was seen, with 5.
    found = control.correct(noise(0, 2), terms_with([2.0, 1.5], [1.0, 1.0], [0, 1]))
    assert found.tolist() == [4 + 4 - 2 * 4, 5 + 5 - 1.5 * 5]
    found = control.correct(noise(1), terms_with([3.0], [1.0], [0]))
    assert found.tolist() == [8 - 3 * 4, 10]


def test_variances_of_pairs_are_those_of_their_means():
    nats = np.array([[1.0, 3.0, 4.0, 8.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    means = np.array([2.0, 6.0, 1.0])
    np.testing.assert_allclose(pair_variance(nats), [means.var(ddof=1) / 3, 0])
    assert corpus_error(nats, 4) == pytest.approx(np.sqrt(means.var(ddof=1) / 3) / 4)


# --- Noise ---


def rows_of(number, padding=0):
    sample = torch.randint(5, 8, (number, 6), generator=torch.Generator().manual_seed(0))
    sample[:, 0], sample[:, -1] = CLS, SEP
    maskable = torch.ones_like(sample, dtype=torch.bool)
    maskable[:, 0] = False
    maskable[::2, 1] = False
    pad = torch.nn.functional.pad
    return pad(sample, (0, padding), value=PAD), pad(maskable, (0, padding))


@pytest.mark.parametrize("case", CASES)
def test_noise_depends_on_the_key_of_a_row_and_on_the_draw_alone(case):
    schedule, estimator, steps = CASES[case]

    def noise_of(rows, draw, padding=0):
        sample, maskable = rows_of(8, padding)
        keys = [(row_key(row[:6].tolist()), 0) for row in sample[rows]]
        noise = evaluation_noise(scheduler_of(schedule), sample[rows], maskable[rows], keys, draw, estimator, steps)
        return noise.noisy[:, :6], noise.timesteps

    for draw in (0, 1, 6):
        noisy, times = noise_of([*range(8)], draw)
        for rows in ([3], [6, 1], [7, 6, 5, 4, 3, 2, 1, 0], [2, 2]):
            some, some_times = noise_of(rows, draw, padding=3)
            assert torch.equal(some, noisy[rows])
            assert torch.equal(some_times, times[rows])
    assert not torch.equal(noise_of([*range(8)], 0)[0], noise_of([*range(8)], 2)[0])


@pytest.mark.parametrize("draw", [0, 1, 5])
def test_counts_and_times_of_each_draw_are_uniform(draw):
    sample, maskable = (part[1:2].expand(2000, -1) for part in rows_of(8))
    keys = [(i, 0) for i in range(2000)]
    counted = evaluation_noise(scheduler_of(), sample, maskable, keys, draw, "count")
    counts = np.bincount((counted.noisy == MASK).sum(dim=1).numpy(), minlength=6)
    assert counts[0] == 0
    assert chisquare(counts[1:]).pvalue > SIGNIFICANT
    timed = evaluation_noise(scheduler_of("spindle"), sample, maskable, keys, draw, "nonempty")
    assert kstest(timed.timesteps.double().numpy(), "uniform").pvalue > SIGNIFICANT
    assert (timed.noisy == MASK).any(dim=1).all()


def test_the_draws_of_a_pair_mask_every_token():
    sample, maskable = rows_of(8)
    keys = [(i, 0) for i in range(8)]
    seen = Counter()
    for pair, half in itertools.product(range(3), range(2)):
        noise = evaluation_noise(scheduler_of(), sample, maskable, keys, 2 * pair + half, "count")
        seen.update((pair, position) for position in noise.positions.tolist())
    assert len(seen) == 3 * int(maskable.sum())


def test_the_estimator_is_checked_and_chosen():
    linear, spindle = scheduler_of(), scheduler_of("spindle")
    assert choose_estimator(linear, None, None) == "count"
    assert choose_estimator(linear, None, 10) == choose_estimator(spindle, None, None) == "nonempty"
    assert choose_estimator(linear, "independent", None) == "independent"
    for scheduler, steps in ((spindle, None), (linear, 10)):
        with pytest.raises(ValueError, match="`estimator='count'` needs continuous time"):
            choose_estimator(scheduler, "count", steps)
    with pytest.raises(ValueError, match=r"`estimator` must be one of \['count', 'nonempty', 'independent'\]"):
        choose_estimator(linear, "counts", None)


def test_draws_of_independent_masks_know_nothing_of_each_other():
    """Those of the other estimators are opposite in pairs."""
    scheduler, sample = scheduler_of(), torch.tensor([[CLS, 5, 6, 7, SEP]])
    times = {
        estimator: [
            evaluation_noise(scheduler, sample, sample > CLS, [(0, 0)], draw, estimator).timesteps.item()
            for draw in range(40)
        ]
        for estimator in ("nonempty", "independent")
    }
    pairs = {estimator: np.array(values).reshape(-1, 2) for estimator, values in times.items()}
    assert len(set(times["independent"])) == 40
    assert np.corrcoef(pairs["nonempty"].T)[0, 1] < -0.5
    assert abs(np.corrcoef(pairs["independent"].T)[0, 1]) < 0.5
