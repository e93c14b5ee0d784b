"""
g is a distribution function in time, for every schedule and any token counts; the noise that is drawn follows it.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import COUNTS, MASK, g_of, spindle_h

from diffusers_text import AbsorbingStateScheduler

SCHEDULES = ["linear", "loglinear", "cosine", "polynomial", "geometric"]
counts_strategy = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**12)), min_size=2, max_size=40).filter(any)


def spindle(counts, **kwargs):
    return AbsorbingStateScheduler(schedule="spindle", token_counts=counts, mask_token_id=0, **kwargs)


@settings(max_examples=200, deadline=None)
@given(
    counts=counts_strategy,
    spindle_lambda=st.floats(0, 1),
    information=st.sampled_from(["surprisal", "log_count"]),
    mean=st.sampled_from(["corpus", "sentence"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_spindle_is_monotone_in_unit_interval_with_finite_rates(counts, spindle_lambda, information, mean, dtype):
    scheduler = spindle(counts, spindle_lambda=spindle_lambda, spindle_information=information, spindle_mean=mean)
    times = (
        torch.cat([torch.zeros(1), torch.logspace(-5, 0, 200), torch.linspace(0.01, 1, 100)]).sort().values.to(dtype)
    )
    ids = torch.arange(len(counts))[None].expand(len(times), -1)
    g = scheduler.noise.g(times[:, None], scheduler.noise.token_offsets(ids, ids).to(dtype))
    assert g.dtype == dtype
    assert (g[0] == 0).all()
    assert (g[-1] == 1).all()
    assert ((g >= 0) & (g <= 1)).all()
    assert (g.diff(dim=0) >= 0).all()
    rates = scheduler.noise.rate(times[1:, None], scheduler.noise.token_offsets(ids, ids)[1:].to(dtype))
    assert rates.isfinite().all()
    assert (rates > 0).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_independent_schedules_are_monotone_with_finite_rates(schedule, dtype):
    scheduler = AbsorbingStateScheduler(schedule=schedule)
    times = torch.cat([torch.zeros(1), torch.logspace(-5, 0, 500)]).to(dtype)
    g = scheduler.mask_probability(times)
    assert g.shape == (501, 1)
    assert g[0] == 0
    assert abs(g[-1].item() - 1) < 1e-6
    assert ((g >= 0) & (g <= 1)).all()
    assert (g.diff(dim=0) >= 0).all()
    assert scheduler.unmasking_rate(times[1:]).isfinite().all()


@pytest.mark.parametrize("schedule", [*SCHEDULES, "spindle"])
def test_the_derivative_is_that_of_g(schedule):
    scheduler = AbsorbingStateScheduler(schedule=schedule, token_counts=COUNTS)
    times = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)[:, None].requires_grad_()
    h = torch.tensor(spindle_h())[None] if schedule == "spindle" else None
    g = scheduler.noise.g(times, h)
    for column in range(g.shape[1]):
        (slope,) = torch.autograd.grad(g[:, column].sum(), times, retain_graph=True)
        rate = scheduler.noise.rate(times, h)[:, column : column + 1]
        torch.testing.assert_close(rate, slope / g[:, column : column + 1])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial", "geometric", "spindle"])
def test_g_equals_the_papers_formula(schedule):
    scheduler = AbsorbingStateScheduler(schedule=schedule, token_counts=COUNTS)
    ids = torch.arange(len(COUNTS))[None]
    for t in (0.001, 0.3, 0.5, 0.9, 1.0):
        g = scheduler.mask_probability(torch.tensor([t], dtype=torch.float64), ids)
        np.testing.assert_allclose(np.broadcast_to(g.numpy()[0], len(COUNTS)), g_of(schedule, t), rtol=1e-9)


def test_lambda_zero_is_linear():
    times, ids = torch.rand(4), torch.arange(8).expand(4, -1)
    torch.testing.assert_close(
        spindle(COUNTS, spindle_lambda=0.0).mask_probability(times, ids), times[:, None].double().expand(-1, 8)
    )


def test_informative_tokens_are_masked_first():
    """Spindle differs from linear for every token whose information is not the mean's, in the stated direction."""
    for information in ("surprisal", "log_count"):
        scheduler = spindle(COUNTS, spindle_information=information)
        rare, frequent = scheduler.mask_probability(torch.tensor([0.5]), torch.tensor([[5, 7]]))[0]
        assert rare > 0.505
        assert frequent < 0.495


def test_the_clamp_touches_only_the_paper_s_offsets():
    counts = [int(10**6 / rank) for rank in range(1, 2000)]
    limit = 0.95 / (math.pi * 0.3)
    ids = torch.arange(len(counts))[None]
    paper = spindle(counts).noise.token_offsets(ids, ids)
    released = spindle(counts, spindle_information="log_count").noise.token_offsets(ids, ids)
    assert (paper.abs() >= limit - 1e-12).any()
    assert (released.abs() < limit).all()


def test_sentence_mean_centres_each_row_on_itself():
    """
    With one kind of token in the row, its information is the row's mean and h is 0: the schedule is linear there.
    """
    scheduler = spindle(COUNTS, spindle_mean="sentence", suppressed_token_ids=[2])
    ids = torch.tensor([[2, 7, 7, 7], [2, 5, 5, 5]])
    g = scheduler.mask_probability(torch.tensor([0.5, 0.5]), ids)
    torch.testing.assert_close(g[:, 1:], torch.full((2, 3), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
def test_noise_frequencies_match_g_per_token(schedule):
    scheduler = AbsorbingStateScheduler(mask_token_id=MASK, schedule=schedule, token_counts=COUNTS)
    draws = 100_000
    sample = torch.tensor([[3, 5, 6, 7]]).expand(draws, -1)
    generator = torch.Generator().manual_seed(0)
    for t in (0.1, 0.5, 0.9):
        noisy = scheduler.add_noise(sample, torch.full((draws,), t), generator=generator)
        frequency = (noisy == MASK).double().mean(0).numpy()
        g = g_of(schedule, t)[[3, 5, 6, 7]]
        assert (np.abs(frequency - g) < 4.5 * np.sqrt(g * (1 - g) / draws)).all()
        assert ((noisy == sample) | (noisy == MASK)).all()


def test_positions_are_noised_independently():
    scheduler = AbsorbingStateScheduler(mask_token_id=MASK)
    noisy = scheduler.add_noise(torch.full((100_000, 2), 5), torch.full((100_000,), 0.5))
    both = (noisy == MASK).all(1).double().mean()
    assert abs(both - 0.25) < 0.007
