"""Noise of training and evaluation: whose it is, and by which law it is drawn."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chisquare, kstest
from toys import CLS, COUNTS, MASK, PAD, SEP, g_of

from diffusers_text import AbsorbingStateScheduler
from diffusers_text.noising import MASKS, ORDER, TIMES, draw_noise, keyed_generator, row_key
from diffusers_text.training.noise import training_noise

SIGNIFICANT = 1e-4


def scheduler_of(schedule="linear"):
    counts = COUNTS if schedule == "spindle" else None
    return AbsorbingStateScheduler(mask_token_id=MASK, vocab_size=8, schedule=schedule, token_counts=counts)


def arguments(**kwargs):
    """What the noise reads of the training's arguments."""
    defaults = {
        "seed": 3,
        "mask_sampling": "count",
        "objective": "continuous",
        "num_diffusion_steps": 10,
        "time_epsilon": 1e-3,
        "time_power": 1.0,
    }
    return SimpleNamespace(**{**defaults, **kwargs})


KINDS = {
    "count": arguments(),
    "independent": arguments(mask_sampling="independent"),
    "discrete": arguments(mask_sampling="independent", objective="discrete"),
}


@pytest.fixture(params=KINDS)
def args(request):
    return KINDS[request.param]


def sample_of(rows, length=6):
    sample = torch.randint(5, 8, (rows, length), generator=torch.Generator().manual_seed(0))
    sample[:, 0], sample[:, -1] = CLS, SEP
    maskable = torch.ones_like(sample, dtype=torch.bool)
    maskable[:, 0] = False
    maskable[::2, 1] = False  # rows have different numbers of maskable tokens
    return sample, maskable


def first(key, n=4):
    return torch.rand(n, generator=keyed_generator(*key), dtype=torch.float64)


# --- Keys ---


def test_a_key_gives_the_same_stream_every_time():
    assert torch.equal(first((1, 2, 3)), first((1, 2, 3)))


@pytest.mark.parametrize("other", [(1, 2, 3, 0), (1, 2), (2, 1, 3), (1, 2, 4), (0, 1, 2, 3), (1, 2, 3 + 2**32)])
def test_another_key_gives_another_stream(other):
    assert not torch.equal(first((1, 2, 3)), first(other))


def test_a_shorter_key_is_not_one_with_a_zero_at_its_end():
    assert not torch.equal(first((1, 2)), first((1, 2, 0)))
    assert not torch.equal(first((1, 2**32 + 5)), first((1, 5, 1)))


def test_first_draws_of_near_keys_look_independent():
    """All of a grid of keys together are uniform, and those side by side are uncorrelated."""
    grid = torch.stack([torch.stack([first((MASKS, 0, i, j), 1)[0] for j in range(40)]) for i in range(40)]).numpy()
    assert kstest(grid.ravel(), "uniform").pvalue > SIGNIFICANT
    for left, right in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:]), (grid[:-1, 1:], grid[1:, :-1])):
        correlation = np.corrcoef(left.ravel(), right.ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(left.size)
    purposes = np.array([[first((kind, 0, i), 1)[0].item() for i in range(500)] for kind in (TIMES, MASKS, ORDER)])
    assert np.abs(np.corrcoef(purposes) - np.eye(3)).max() < 4 / np.sqrt(500)


def test_the_key_of_a_row_is_that_of_its_tokens():
    rows = [list(ids) for n in range(4) for ids in itertools.product([0, 1, 256], repeat=n)]
    keys = [row_key(ids) for ids in rows]
    assert len(set(keys)) == len(rows)
    assert all(0 <= key < 2**64 for key in keys)
    assert row_key([5, 6]) == row_key(np.array([5, 6], dtype=np.int32)) == row_key(torch.tensor([5, 6]).tolist())


# --- Training ---


def noise_of(args, step=0, rows=None, total=8, padding=0, schedule="linear"):
    """(noisy rows, times) of the rows `rows` of a step, with columns of padding."""
    rows = [*range(total)] if rows is None else rows
    sample, maskable = sample_of(total)
    sample, maskable = sample[rows], maskable[rows]
    sample = torch.nn.functional.pad(sample, (0, padding), value=PAD)
    maskable = torch.nn.functional.pad(maskable, (0, padding))
    noise = training_noise(scheduler_of(schedule), sample, maskable, args, step, rows, total)
    assert torch.equal(noise.sample, sample)
    assert (noise.noisy[~maskable] == sample[~maskable]).all()
    assert ((noise.noisy == sample) | (noise.noisy == MASK)).all()
    assert noise.positions.tolist() == (noise.noisy == MASK).flatten().nonzero().flatten().tolist()
    assert noise.by_count == (args.mask_sampling == "count")
    return noise.noisy[:, :6], noise.timesteps


def test_a_row_s_noise_depends_on_seed_step_and_row_and_on_nothing_else(args):
    noisy, times = noise_of(args)
    for rows in ([5], [7, 2], [0, 1, 2, 3], [4, 5, 6, 7]):
        for padding in (0, 1, 40):
            some, some_times = noise_of(args, rows=rows, padding=padding)
            assert torch.equal(some, noisy[rows])
            assert torch.equal(some_times, times[rows])
    for other in (noise_of(args, step=1), noise_of(SimpleNamespace(**{**vars(args), "seed": 4}))):
        assert not torch.equal(other[1], times)
        assert not torch.equal(other[0], noisy)


@pytest.mark.parametrize("total", [1, 4, 7])
def test_times_are_stratified_over_the_whole_step(total):
    args = arguments(mask_sampling="independent", time_epsilon=0.0)
    for step in range(20):
        parts = [noise_of(args, step, [row], total)[1] for row in range(total)]
        strata = ((1 - torch.cat(parts)) * total).floor()
        assert sorted(strata.tolist()) == [*range(total)]


def test_the_time_of_each_row_is_uniform_over_steps():
    args = arguments(mask_sampling="independent", time_epsilon=0.0)
    times = torch.stack([noise_of(args, step, total=4)[1] for step in range(1500)])
    for row in times.double().numpy().T:
        assert kstest(row, "uniform").pvalue > SIGNIFICANT


def test_no_time_is_smaller_than_the_cut():
    times = torch.cat([noise_of(arguments(mask_sampling="independent", time_epsilon=0.4), s)[1] for s in range(400)])
    assert times.min() >= 0.4
    assert times.max() <= 1
    assert kstest((times.double().numpy() - 0.4) / 0.6, "uniform").pvalue > SIGNIFICANT


def test_times_of_the_discrete_objective_are_uniform_on_its_grid():
    times = torch.cat([noise_of(KINDS["discrete"], step)[1] for step in range(400)])
    steps = (times * 10).round()
    torch.testing.assert_close(times, steps / 10)
    assert chisquare(np.bincount(steps.long().numpy(), minlength=11)[1:]).pvalue > SIGNIFICANT


def test_the_number_of_masked_tokens_is_uniform_and_all_choices_are_alike():
    masked = torch.stack([noise_of(KINDS["count"], step)[0] == MASK for step in range(1500)])  # [steps, rows, seq]
    for row, length in ((0, 4), (1, 5)):
        counts = np.bincount(masked[:, row].sum(dim=1).numpy(), minlength=7)
        assert counts[0] == counts[length + 1 :].sum() == 0
        assert chisquare(counts[1 : length + 1]).pvalue > SIGNIFICANT
    pairs = masked[:, 1, 1:][masked[:, 1].sum(dim=1) == 2]
    choices = np.bincount(((pairs.long() * 2 ** torch.arange(5)).sum(dim=1)).numpy(), minlength=32)
    assert chisquare([choices[2**i + 2**j] for i, j in itertools.combinations(range(5), 2)]).pvalue > SIGNIFICANT


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_time_of_a_counted_row_is_one_at_which_its_noise_could_stop(schedule):
    """g(t) is uniform, and given t each of the tokens but the last masked one is masked with probability g(t)."""
    drawn = [noise_of(KINDS["count"], step, schedule=schedule) for step in range(1500)]
    levels = np.array([[g_of(schedule, t)[0] for t in times.tolist()] for _, times in drawn])
    masked = np.array([(noisy == MASK).sum(dim=1).tolist() for noisy, _ in drawn])
    for row, length in ((0, 4), (1, 5)):
        assert kstest(levels[:, row], "uniform").pvalue > SIGNIFICANT
        low = levels[:, row] < 0.5
        for half in (low, ~low):
            # count - 1 ~ Binomial(length - 1, g)
            expected = (length - 1) * levels[half, row]
            variance = (expected * (1 - levels[half, row])).sum()
            assert abs((masked[half, row] - 1 - expected).sum()) < 4 * np.sqrt(variance)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
@pytest.mark.parametrize("t", [0.2, 0.7])
def test_independent_noise_masks_a_token_with_its_g(schedule, t):
    sample = torch.tensor([[CLS, SEP, 5, 6, 7]]).expand(2000, -1)
    maskable = torch.tensor([[False, True, True, True, True]]).expand(2000, -1)
    generators = [keyed_generator(MASKS, row) for row in range(2000)]
    noise = draw_noise(scheduler_of(schedule), sample, maskable, torch.full((2000,), t), generators, by_count=False)
    assert (noise.timesteps == t).all()
    masked = (noise.noisy == MASK).numpy()
    for column in range(1, 5):
        expected = g_of(schedule, t)[sample[0, column]]
        assert binomtest(int(masked[:, column].sum()), 2000, expected).pvalue > SIGNIFICANT
    correlations = np.corrcoef(masked[:, 1:].T) - np.eye(4)
    assert np.abs(correlations).max() < 4.5 / np.sqrt(2000)


def test_a_row_without_maskable_tokens_stays_as_it_is(args):
    sample, _ = sample_of(3)
    nothing = torch.zeros_like(sample, dtype=torch.bool)
    noise = training_noise(scheduler_of(), sample, nothing, args, 0, [0, 1, 2], 3)
    assert torch.equal(noise.noisy, sample)
    assert len(noise.positions) == 0
    assert ((noise.timesteps > 0) & (noise.timesteps <= 1)).all()
