"""ReMDM: its laws by enumeration, and step by step."""

import itertools
import math

import numpy as np
import pytest
import torch
from strategies import (
    IDS,
    REMDM,
    SCHEDULES,
    SPINDLE,
    check_remdm_law,
    far_apart,
    model_of,
    own_loop,
    remdm_law,
    run,
    sampled,
    time_of,
)
from toys import EMITTED, MASK, assert_follows, canvases, exact_law, g_of, seeded

from diffusers_text import ReMDMScheduler

SEED = 24
LOOP = {"t_on": 0.6, "t_off": 0.2, "alpha_on": 0.6}


@pytest.mark.parametrize("strategy", ["cap", "rescale", "confidence"])
def test_a_caller_who_fills_what_was_proposed_leaves_the_others_their_time(strategy):
    """Of two positions one is proposed in the first step and filled: the other is due in any later one alike."""
    scheduler = ReMDMScheduler(mask_token_id=MASK, vocab_size=8, strategy=strategy, eta=0.0)
    scheduler.set_timesteps(8)
    canvas, generator = torch.full((20_000, 2), MASK), seeded(3)
    positions, before = scheduler.next_positions(canvas, generator)
    canvas.view(-1)[positions] = EMITTED[0]
    left = (before == 1) & (canvas == MASK).any(dim=1)
    positions, times = scheduler.next_positions(canvas, generator)
    assert set(times[~(canvas == MASK).any(dim=1)].tolist()) == {0.0}
    later = scheduler.timesteps[1:]
    assert_follows((times[left, None] * 8).round(), torch.full((7,), 1 / 7), (later[:, None] * 8).round().long())
    canvas.view(-1)[positions] = EMITTED[0]
    assert len(scheduler.next_positions(canvas, generator)[0]) == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_remasking_by_nothing_is_ancestral(schedule, steps):
    model = model_of(SEED)
    for strategy in ("cap", "rescale"):
        law = remdm_law(model, 2, steps, schedule=schedule, strategy=strategy, eta=0.0)
        assert np.allclose(law, exact_law(model, steps, schedule), atol=1e-12)


def test_without_eta_remdm_samples_the_ancestral_law():
    found = sampled(ReMDMScheduler(eta=0.0, **SPINDLE), model_of(SEED), 2, 3)
    assert_follows(found, exact_law(model_of(SEED), 3, "spindle"), canvases())


@pytest.mark.parametrize(
    ("strategy", "schedule", "steps"),
    [
        *itertools.product(REMDM, SCHEDULES, [5]),
        ("cap", "linear", 1),
        ("loop", "linear", 2),
        ("rescale", "linear", 3),
        ("confidence", "linear", 3),
    ],
)
def test_remdm_follows_its_law(strategy, schedule, steps):
    check_remdm_law(SEED, steps, {"schedule": schedule, "strategy": strategy, "eta": 0.3, **LOOP})


@pytest.mark.parametrize(
    ("kwargs", "call"),
    [
        ({"strategy": "cap", "eta": 1.0}, {}),  # sigma is sigma_max
        ({"strategy": "rescale", "eta": 1.0, "schedule": "cosine"}, {}),
        ({"strategy": "cap", "eta": 0.3}, {"temperature": 0.5}),
        ({"strategy": "rescale", "eta": 0.3, "schedule": "spindle"}, {"temperature": 0.5}),
        ({"strategy": "cap", "eta": 0.3, "schedule": "spindle", "tilt": False}, {}),
        ({"strategy": "rescale", "eta": 0.3, "schedule": "spindle", "spindle_mean": "sentence"}, {}),
        ({"strategy": "loop", "eta": 0.3, "t_on": 0.55, "t_off": 0.3, "alpha_on": 0.5}, {}),  # off the grid
        ({"strategy": "cap", "eta": 0.3, "schedule": "spindle"}, {"start": [6, MASK], "emitted": EMITTED[1:]}),
        ({"strategy": "confidence"}, {"start": [6, MASK], "emitted": EMITTED[1:]}),
    ],
)
def test_remdm_follows_its_law_otherwise_too(kwargs, call):
    check_remdm_law(SEED, 4, kwargs, **call)


@pytest.mark.parametrize("kwargs", [{"strategy": "confidence"}, {"strategy": "cap", "eta": 0.3}])
def test_remdm_follows_its_law_on_three_positions(kwargs):
    """Here weights of the strategy `confidence` and a mask stand side by side."""
    check_remdm_law(204, 3, kwargs, length=3)


@pytest.mark.parametrize(
    "kwargs", [{"strategy": "rescale", "eta": 0.3, "schedule": "cosine"}, {"strategy": "loop", "eta": 0.3, **LOOP}]
)
def test_remdm_tells_a_time_conditioned_model_how_much_is_masked(kwargs):
    check_remdm_law(SEED, 5, kwargs, conditioning="layerwise")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_remasking_matters_to_the_toy(schedule):
    """Without this, the proofs above could pass with strategies that do nothing."""
    ancestral, *laws = (
        remdm_law(model_of(SEED), 2, 5, schedule=schedule, strategy=strategy, eta=eta, **LOOP)
        for strategy, eta in (("cap", 0.0), ("cap", 0.3), ("rescale", 0.3), ("confidence", 0.3), ("loop", 0.3))
    )
    for law in laws:
        assert far_apart(law, ancestral)


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [("cap", "linear"), ("rescale", "spindle"), ("confidence", "spindle"), ("loop", "cosine")],
)
def test_own_loop_of_remdm_follows_the_same_law(strategy, schedule):
    kwargs = {"strategy": strategy, "eta": 0.3, **LOOP}
    found = own_loop(ReMDMScheduler(**IDS, **SCHEDULES[schedule], **kwargs), model_of(SEED), 2, 5)
    assert_follows(found, remdm_law(model_of(SEED), 2, 5, schedule=schedule, **kwargs), canvases())


# --- ReMDM step by step ---

POSITIONS = 20_000


def masked_shares(scheduler, steps, token, own_loop):
    """The share of masked positions after each step, with a denoiser that is sure of `token`."""
    logits = torch.full((1, POSITIONS, 8), -1e4)
    logits[..., token] = 0.0
    sample, generator = torch.full((1, POSITIONS), MASK), seeded()
    if not own_loop:
        return [
            (after == MASK).double().mean().item() for _, after, _ in run(scheduler, sample, steps, logits, generator)
        ]
    scheduler.set_timesteps(steps)
    shares = []
    for t in scheduler.timesteps:
        sample = scheduler.step(logits, t, sample, generator=generator).prev_sample
        shares.append((sample == MASK).double().mean().item())
    return shares


def assert_shares(shares, expected):
    assert len(shares) == len(expected)
    for share, g in zip(shares, expected):
        assert abs(share - g) <= 4.5 * math.sqrt(max(g * (1 - g), 0) / POSITIONS) + 1e-12


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("strategy", "eta"), [("cap", 0.1), ("cap", 0.9), ("rescale", 0.5), ("rescale", 1.0)])
def test_a_position_is_masked_with_probability_g_whatever_sigma_is(strategy, eta, schedule, own_loop):
    for token in (5, 7) if schedule == "spindle" else (7,):
        scheduler = ReMDMScheduler(**IDS, **SCHEDULES[schedule], strategy=strategy, eta=eta)
        shares = masked_shares(scheduler, 8, token, own_loop)
        assert_shares(shares, [g_of(schedule, i / 8)[token] for i in range(7, -1, -1)])


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("eta", [0.05, 0.9])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_loop_rests_at_alpha_on(schedule, eta, own_loop):
    scheduler = ReMDMScheduler(**IDS, schedule=schedule, strategy="loop", eta=eta, t_on=0.7, t_off=0.2, alpha_on=0.75)
    shares = masked_shares(scheduler, 10, 7, own_loop)
    if schedule == "linear":  # as in the paper
        before, after = [1 - 0.75 * (1 - t) / 0.3 for t in (0.9, 0.8)], [0.25 * 0.1 / 0.2, 0.0]
    else:
        on = time_of(schedule, 0.25)
        before = [g_of(schedule, on + (1 - on) * (t - 0.7) / 0.3)[0] for t in (0.9, 0.8)]
        after = [g_of(schedule, on * 0.1 / 0.2)[0], 0.0]
    assert_shares(shares, [*before, *[0.25] * 6, *after])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("strategy", "eta"), [("cap", 0.1), ("cap", 0.6), ("rescale", 0.5), ("loop", 0.6)])
def test_a_revealed_token_is_taken_back_with_probability_sigma(strategy, eta, schedule):
    """min(eta, sigma_max) or eta sigma_max, sigma_max = min(1, g(s) / (1 - g(t))) of the token that stands there."""
    scheduler = ReMDMScheduler(**IDS, **SCHEDULES[schedule], strategy=strategy, eta=eta, **LOOP)
    scheduler.set_timesteps(10)
    sample, generator = torch.full((1, POSITIONS), MASK), seeded()
    tokens = [5, 7]
    logits = torch.full((1, POSITIONS, 8), -1e4)
    logits[..., tokens] = 0.0
    on = time_of(schedule, 1 - LOOP["alpha_on"])
    for i, t in enumerate(scheduler.timesteps):
        before, sample = sample, scheduler.step(logits, t, sample, generator=generator).prev_sample
        for token in tokens:
            times = [(10 - i) / 10, (9 - i) / 10]
            resting = 0.2 < times[0] <= 0.6
            if strategy == "loop" and resting:
                times = [on, on]
            g_t, g_s = (g_of(schedule, time)[token] for time in times)
            sigma_max = min(1, g_s / (1 - g_t)) if g_t < 1 else 1
            sigma = eta * sigma_max if strategy == "rescale" else min(eta, sigma_max)
            if strategy == "loop" and not resting:
                sigma = 0
            revealed = (before == token).sum().item()
            taken_back = ((before == token) & (sample == MASK)).sum().item()
            assert abs(taken_back - revealed * sigma) <= 4.5 * math.sqrt(revealed * sigma * (1 - sigma))


@pytest.mark.parametrize("schedule", ["linear", "spindle"])
def test_the_strategy_confidence_takes_back_in_proportion_to_exp_of_minus_psi(schedule):
    """psi of each token is what it was drawn with under the tilted p, and stays when p changes."""
    rows, length, token_ids = 5_000, 6, [5, 6, 7]
    p = np.zeros(8)
    p[token_ids] = 0.02, 0.08, 0.9
    scheduler = ReMDMScheduler(**IDS, **SCHEDULES[schedule], strategy="confidence")
    scheduler.set_timesteps(5)
    generator = seeded()
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(p)).float().expand(rows, length, 8)
    sample = torch.full((rows, length), MASK)
    sample = scheduler.step(logits, 1.0, sample, generator=generator).prev_sample  # g(1) = 1 does not tilt
    after = scheduler.step(torch.zeros_like(logits), 0.8, sample, generator=generator).prev_sample
    revealed = (sample != MASK).numpy()
    weights = np.exp(-p[sample.numpy()]) * revealed
    weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    g_t, g_s = g_of(schedule, 0.8), g_of(schedule, 0.6)
    sigma = weights * np.minimum(1, g_s / (1 - g_t))[sample.numpy()] * revealed
    taken_back = (after == MASK).numpy() & revealed
    for token in token_ids:
        for others in range(1, 4):
            here = (sample.numpy() == token) & (revealed.sum(1, keepdims=True) == others)
            expected, variance = sigma[here].sum(), (sigma * (1 - sigma))[here].sum()
            assert abs(taken_back[here].sum() - expected) <= 4.5 * math.sqrt(variance) + 1e-6


@pytest.mark.parametrize("strategy", REMDM)
def test_the_loop_remasks_between_t_on_and_t_off_and_the_others_all_the_time(strategy):
    scheduler = ReMDMScheduler(**IDS, strategy=strategy, eta=0.5, t_on=0.7, t_off=0.2, alpha_on=0.75)
    sample, remasks, logits, generator = torch.full((500, 40), MASK), [], torch.zeros(500, 40, 8), seeded()
    scheduler.set_timesteps(10)
    for t in scheduler.timesteps:
        before, sample = sample, scheduler.step(logits, t, sample, generator=generator).prev_sample
        remasks.append(bool(((before != MASK) & (sample == MASK)).any()))
    if strategy == "loop":  # in the step from 0.2 to 0.1 no more
        assert remasks == [False] * 3 + [True] * 5 + [False] * 2
    else:  # at first there is nothing to remask, and at last nothing may be
        assert remasks == [False] + [True] * 8 + [False]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"strategy": "cap", "eta": 0.3},
        {"strategy": "cap", "eta": 1.0},
        {"strategy": "rescale", "eta": 0.3},
        {"strategy": "confidence"},
        {"strategy": "loop", "eta": 0.3, **LOOP},
    ],
)
def test_remdm_laws_hold_for_more_samples(kwargs, schedule, steps):
    check_remdm_law(24, steps, {**kwargs, "schedule": schedule}, samples=100_000)
