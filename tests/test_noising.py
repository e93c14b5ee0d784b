"""Noise for rows: weights that make up for how times are drawn, opposite draws, noise that masks something."""

import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import chisquare, ks_2samp
from toys import CLS, COUNTS, MASK, PAD, SEP, g_of

from diffusers_text import AbsorbingStateScheduler
from diffusers_text.noising import MASKS, draw_noise, keyed_generator

SIGNIFICANT = 1e-4
GRID = (torch.arange(200_000) + 0.5) / 200_000  # uniform numbers without any chance


def scheduler_of(schedule="linear"):
    counts = COUNTS if schedule == "spindle" else None
    return AbsorbingStateScheduler(mask_token_id=MASK, vocab_size=8, schedule=schedule, token_counts=counts)


def noise_of(uniforms, words=(5, 6, 7), by_count=False, schedule="linear", padding=0, **kwargs):
    """Noise of as many rows `[CLS] words [SEP]` as there are uniform numbers, [SEP] among what may be masked."""
    row = torch.tensor([CLS, *words, SEP, *[PAD] * padding])
    sample = row.expand(len(uniforms), -1)
    maskable = ((row != CLS) & (row != PAD)).expand(len(uniforms), -1)
    generators = [keyed_generator(MASKS, i) for i in range(len(uniforms))]
    return draw_noise(scheduler_of(schedule), sample, maskable, uniforms, generators, by_count, **kwargs)


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 3.0])
def test_weights_make_any_power_of_uniform_numbers_uniform(power):
    """The weighted mean of any function of time is its integral; here of functions that single out small times."""
    uniforms = GRID[::100]
    noise = noise_of(uniforms, power=power)
    times, weights = noise.timesteps.double(), noise.weights
    torch.testing.assert_close(times, uniforms.double() ** power, rtol=1e-5, atol=1e-9)
    for function in (lambda t: 1 + 0 * t, lambda t: t, lambda t: (3 * t).cos()):
        expected = quad(lambda t: function(torch.tensor(t)).item(), 0, 1)[0]
        assert (weights * function(times)).mean().item() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_weights_make_counts_and_steps_uniform(power):
    uniforms = GRID[::40]
    counted = noise_of(uniforms, by_count=True, power=power)
    number = (counted.noisy == MASK).sum(dim=1)
    for count in range(1, 5):
        assert (counted.weights * (number == count)).mean().item() == pytest.approx(1 / 4, abs=1e-3)
    stepped = noise_of(uniforms, num_steps=5, power=power)
    for step in range(1, 6):
        share = (stepped.weights * ((stepped.timesteps * 5).round() == step)).mean().item()
        assert share == pytest.approx(1 / 5, abs=1e-3)
    if power > 1:  # what the power is for
        assert (number == 1).double().mean() > 1.5 / 4


def test_a_cut_moves_times_and_no_weights():
    noise = noise_of(GRID[::1000], time_epsilon=0.3)
    torch.testing.assert_close(noise.timesteps.double(), 0.3 + 0.7 * GRID[::1000].double(), rtol=1e-5, atol=1e-7)
    assert (noise.weights == 1).all()


@pytest.mark.parametrize("kwargs", [{"by_count": True}, {}, {"nonempty": True}, {"num_steps": 7}])
def test_opposite_noise_has_the_same_law(kwargs):
    uniforms = 1 - torch.rand(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, opposite = (noise_of(uniforms, antithetic=antithetic, **kwargs) for antithetic in (False, True))
    assert ks_2samp(plain.timesteps, opposite.timesteps).pvalue > SIGNIFICANT
    codes = [((noise.noisy == MASK).long() * 2 ** torch.arange(5)).sum(dim=1).numpy() for noise in (plain, opposite)]
    counts = np.array([np.bincount(code, minlength=32) for code in codes])
    counts = counts[:, counts.sum(axis=0) > 0]
    expected = counts.sum(axis=0) / 2
    assert ((counts - expected) ** 2 / expected).sum() < 2 * counts.shape[1] + 20
    assert np.corrcoef(plain.timesteps, opposite.timesteps)[0, 1] < -0.5


def test_opposite_counts_mask_every_token_together():
    """`k` tokens, then the `L + 1 - k` that are left and one more."""
    uniforms = GRID[::500]
    plain, opposite = (noise_of(uniforms, by_count=True, antithetic=antithetic) for antithetic in (False, True))
    both = torch.stack([plain.noisy == MASK, opposite.noisy == MASK]).long().sum(dim=0)[:, 1:]
    assert (both >= 1).all()
    assert (both.sum(dim=1) == 5).all()


# --- Noise that masks something ---


def masks_of(words, t, schedule):
    """The probability of every set of masked words given that there is one, by enumeration."""
    g = g_of(schedule, t)[list(words)]
    law = {}
    for mask in itertools.product([False, True], repeat=len(words)):
        law[mask] = np.prod(np.where(mask, g, 1 - g))
    empty = law.pop((False,) * len(words))
    return {mask: p / (1 - empty) for mask, p in law.items()}, 1 - empty


@pytest.mark.parametrize("t", [0.01, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
def test_nonempty_noise_is_the_forward_process_given_that_it_masks_something(schedule, t):
    words, rows = (5, 6, 7), 4000
    sample = torch.tensor([[CLS, *words, SEP]]).expand(rows, -1)
    maskable = torch.tensor([[False, True, True, True, False]]).expand(rows, -1)
    times = torch.full((rows,), t)
    generator = torch.Generator().manual_seed(0)
    noisy, probability = scheduler_of(schedule).add_nonempty_noise(
        sample, times, maskable=maskable, generator=generator
    )
    law, expected = masks_of(words, t, schedule)
    torch.testing.assert_close(probability, torch.full((rows,), expected, dtype=torch.float32), rtol=1e-5, atol=1e-7)
    assert torch.equal(noisy[:, [0, 4]], sample[:, [0, 4]])
    found = {mask: 0 for mask in law}
    for row in (noisy[:, 1:4] == MASK).tolist():
        found[tuple(row)] += 1  # a row without any is no key
    likely = [mask for mask, p in law.items() if p * rows >= 5]
    rest = sum(p for mask, p in law.items() if mask not in likely)
    observed = [found[mask] for mask in likely] + [rows - sum(found[mask] for mask in likely)]
    wanted = [law[mask] * rows for mask in likely] + [rest * rows]
    if rest < 1e-12:
        assert observed.pop() == 0
        wanted.pop()
    if len(wanted) > 1:
        assert chisquare(observed, np.array(wanted) * (sum(observed) / sum(wanted))).pvalue > SIGNIFICANT


def test_nonempty_noise_of_a_row_depends_on_its_generator_alone():
    times = torch.tensor([0.1, 0.4, 0.8])
    alone = [noise_of(times[:2], nonempty=True, padding=padding).noisy[:, :5] for padding in (0, 3)]
    assert torch.equal(*alone)
    assert torch.equal(noise_of(times, nonempty=True).noisy[:2], alone[0])


@pytest.mark.parametrize("antithetic", [False, True])
def test_a_row_in_which_nothing_can_be_masked_stays_as_it_is(antithetic):
    sample = torch.tensor([[CLS, 5, 6]])
    nothing = torch.zeros_like(sample, dtype=torch.bool)
    noise = draw_noise(scheduler_of(), sample, nothing, torch.ones(1), None, nonempty=True, antithetic=antithetic)
    assert torch.equal(noise.noisy, sample)
    assert noise.weights.item() == 0


def test_nonempty_noise_needs_a_time_above_zero():
    sample = torch.tensor([[CLS, 5, 6]])
    with pytest.raises(ValueError, match=r"`timesteps` must lie in \(0, 1\]"):
        scheduler_of().add_nonempty_noise(sample, torch.zeros(1))
