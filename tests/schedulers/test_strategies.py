"""Strategies of the reverse process: their laws by enumeration, invariants, exchange of one for another, errors."""

import functools
import itertools
import logging
import math
from fractions import Fraction

import diffusers
import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from toys import (
    CLS,
    COUNTS,
    EMITTED,
    MASK,
    SEP,
    canvases,
    exact_law,
    g_of,
    model_probabilities,
    toy_model,
    toy_tokenizer,
)

from diffusers_text import (
    AbsorbingStateScheduler,
    ConfidenceUnmaskingScheduler,
    ReMDMScheduler,
    TextDiffusionPipeline,
)

SAMPLES = 20_000
SPINDLE = {"schedule": "spindle", "token_counts": COUNTS}
SCHEDULES = {"linear": {}, "cosine": {"schedule": "cosine"}, "spindle": SPINDLE}
IDS = {"mask_token_id": MASK, "vocab_size": 8, "suppressed_token_ids": [0, 1, 2]}
CRITERIA = ["probability", "margin", "entropy"]
REMDM = ["cap", "rescale", "confidence", "loop"]

# Every strategy, by the name that its tests carry.
STRATEGIES = {
    "ancestral": (AbsorbingStateScheduler, {}),
    "ancestral-spindle": (AbsorbingStateScheduler, SPINDLE),
    "count-probability": (ConfidenceUnmaskingScheduler, {"schedule": "cosine"}),
    "count-margin": (ConfidenceUnmaskingScheduler, {"criterion": "margin"}),
    "count-noise": (ConfidenceUnmaskingScheduler, {"criterion": "entropy", "position_temperature": 1.0}),
    "threshold": (ConfidenceUnmaskingScheduler, {"rule": "threshold", "threshold": 0.7}),
    "entropy_bound": (ConfidenceUnmaskingScheduler, {"rule": "entropy_bound", "entropy_bound": 0.8}),
    "cap": (ReMDMScheduler, {"eta": 0.3}),
    "rescale": (ReMDMScheduler, {"strategy": "rescale", "eta": 0.3, "schedule": "cosine"}),
    "confidence": (ReMDMScheduler, {"strategy": "confidence"}),
    "loop": (ReMDMScheduler, {"strategy": "loop", "eta": 0.3, "alpha_on": 0.6}),
    "cap-spindle": (ReMDMScheduler, {**SPINDLE, "eta": 0.3}),
    "loop-spindle": (ReMDMScheduler, {**SPINDLE, "strategy": "loop", "eta": 0.3, "alpha_on": 0.6}),
}
REMASKING = [name for name, (scheduler_class, _) in STRATEGIES.items() if scheduler_class is ReMDMScheduler]


def steps_allowed(name):
    """Whether the strategy `name` takes a number of steps, and whether it takes None."""
    return name not in ("threshold", "entropy_bound"), name not in REMASKING


def steps_for(names, numbers):
    """All pairs of a strategy and a number of steps that it takes, None among them."""
    return [
        (name, steps) for name in names for steps in [None, *numbers] if steps_allowed(name)[1 if steps is None else 0]
    ]


def scheduler_of(name, **kwargs):
    scheduler_class, settings = STRATEGIES[name]
    return scheduler_class(**{**IDS, **settings, **kwargs})


def pipeline_of(scheduler, model=None):
    pipe = TextDiffusionPipeline(model or toy_model(), toy_tokenizer(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def masks(n):
    return " ".join(["[MASK]"] * n)


def run(scheduler, sample, steps, logits, generator=None, **kwargs):
    """The event-driven loop on fixed `logits` [batch, seq, vocab]; yields the positions, the canvas and the times."""
    scheduler.set_timesteps(steps)
    while True:
        positions, timestep = scheduler.next_positions(sample, generator)
        if not len(positions):
            return
        asked = logits.flatten(0, 1)[positions]
        sample = scheduler.step(
            asked, timestep, sample, positions=positions, generator=generator, **kwargs
        ).prev_sample
        yield positions, sample, timestep


# --- Laws: what the rules mean, state by state, with plain floats ---


@functools.cache
def model_of(seed, conditioning="none"):
    """A toy model whose weights do not depend on what its construction draws: the thresholds below are made for it."""
    model, generator = toy_model(time_conditioning=conditioning), seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "time_mlp" not in name:
                parameter.normal_(0, 0.6, generator=generator)
    return model


@functools.cache
def untilted(model, length, time, emitted):
    """p [states, length, vocab] without tilt, at a time where the model is told one."""
    return model_probabilities(model, canvases(length), t=time, emitted=list(emitted))


def sharpen(p, temperature):
    p = p ** (1 / temperature)
    return p / p.sum(-1, keepdims=True)


def entropy_of(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def confidence_of(criterion, p, token):
    if criterion == "probability":
        return p[token]
    if criterion == "margin":
        *_, second, first = sorted(p)
        return first - second
    return math.exp(-entropy_of(p))


def orders_of(confidence, scale):
    """
    All orders of the positions with their probabilities: by confidence, or with Gumbel noise of `scale` on the
    log-confidence, which draws without replacement in proportion to confidence^(1 / scale) (Plackett-Luce).
    """
    if scale == 0:
        yield sorted(range(len(confidence)), key=lambda i: -confidence[i]), 1.0
        return
    weights = [c ** (1 / scale) for c in confidence]
    for order in itertools.permutations(range(len(confidence))):
        chance = 1.0
        for i, first in enumerate(order):
            chance *= weights[first] / sum(weights[j] for j in order[i:])
        yield list(order), chance


def committed(rule, order, confidence, entropy, count, threshold, entropy_bound):
    """Which positions the rule commits, given their order."""
    if rule == "count":
        return order[:count]
    if rule == "threshold":
        return [i for i in order if confidence[i] > threshold] or order[:1]
    # The longest prefix U of the order with sum_U H - max_U H <= bound; one position is always such a prefix.
    fitting = []
    for size in range(1, len(order) + 1):
        run_of = [entropy[i] for i in order[:size]]
        if size == 1 or sum(run_of) - max(run_of) <= entropy_bound:
            fitting.append(size)
    return order[: max(fitting)]


def time_of(schedule, level):
    """Where the common part of g is `level`."""
    return 2 / math.pi * math.asin(level) if schedule == "cosine" else level


def confidence_law(
    model,
    length,
    steps=None,
    *,
    schedule="linear",
    criterion="probability",
    rule="count",
    threshold=0.9,
    entropy_bound=0.1,
    position_temperature=0.0,
    temperature=1.0,
    conditioned=False,
    start=None,
    emitted=EMITTED,
    sizes=None,
):
    """Probabilities of the states of `canvases(length)`; `sizes` collects how many are committed in a pass."""
    states = [tuple(state) for state in canvases(length).tolist()]
    index = {state: i for i, state in enumerate(states)}
    common = "linear" if schedule == "spindle" else schedule
    start = tuple(start or [MASK] * length)
    begun_with = start.count(MASK)

    def after_pass(state, time, count):
        """The law of the state after a forward pass that may commit `count` positions."""
        p = untilted(model, length, time if conditioned else None, tuple(emitted))[index[state]]
        drawn_from = sharpen(p, temperature)
        where = [i for i, token in enumerate(state) if token == MASK]
        entropy = [entropy_of(p[i]) for i in where]
        found = {}
        for candidates in itertools.product(emitted, repeat=len(where)):
            chance = math.prod(drawn_from[i][token] for i, token in zip(where, candidates))
            confidence = [confidence_of(criterion, p[i], token) for i, token in zip(where, candidates)]
            for order, chance_of_order in orders_of(confidence, position_temperature * time):
                kept = committed(rule, order, confidence, entropy, count, threshold, entropy_bound)
                new = list(state)
                for i in kept:
                    new[where[i]] = candidates[i]
                found[tuple(new)] = found.get(tuple(new), 0) + chance * chance_of_order
                if sizes is not None:
                    key = (len(where), len(kept))
                    sizes[key] = sizes.get(key, 0) + law[state] * chance * chance_of_order
        return found

    law = {start: 1.0}
    for i in range(steps or begun_with, 0, -1):
        new_law = {}
        for state, probability in law.items():
            left = state.count(MASK)
            if steps is None:
                time, count = time_of(common, left / begun_with), 1
            else:
                time = i / steps
                count = left - math.floor(g_of(common, (i - 1) / steps)[0] * begun_with + 1e-9)
            following = after_pass(state, time, count) if left and count > 0 else {state: 1.0}
            for new, chance in following.items():
                new_law[new] = new_law.get(new, 0) + probability * chance
        law = new_law
    return np.array([law.get(state, 0.0) for state in states])


def remdm_law(
    model,
    length,
    steps,
    *,
    schedule="linear",
    strategy="cap",
    eta=0.02,
    t_on=0.55,
    t_off=0.05,
    alpha_on=0.9,
    temperature=1.0,
    tilt=True,
    spindle_mean="corpus",
    conditioned=False,
    start=None,
    emitted=EMITTED,
):
    r"""
    ReMDM's posterior (arXiv 2503.00307) with a token's own alpha: a token stays with probability 1 - sigma; a mask
    becomes token k with p_k (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t).
    """
    states = [tuple(state) for state in canvases(length).tolist()]
    index = {state: i for i, state in enumerate(states)}
    start = tuple(start or [MASK] * length)
    given = [token != MASK for token in start]

    def noise_time(t):
        """When alpha is taken: in the loop, alpha runs to `alpha_on`, rests, and runs on."""
        if strategy != "loop":
            return t
        on = time_of(schedule, 1 - alpha_on)
        if t > t_on:
            return on + (1 - on) * (t - t_on) / (1 - t_on)
        return on if t > t_off else on * t / t_off

    def alphas(state, t):
        if schedule == "spindle" and spindle_mean == "sentence":
            # Masked tokens count with the corpus mean, and so does the row's closing [SEP] with its own.
            total = sum(COUNTS)
            information = np.array([-math.log(max(n, 1) / total) for n in COUNTS])
            mean = sum(n / total * i for n, i in zip(COUNTS, information))
            row = [mean if token == MASK else information[token] for token in [*state, SEP]]
            limit = 0.95 / (math.pi * 0.3)
            h = np.clip(1 - sum(row) / len(row) / information, -limit, limit)
            return 1 - (t + 0.3 * math.sin(math.pi * t) * h)
        return 1 - g_of(schedule, t)

    # A state holds with each token that was drawn the probability with which it was, which `confidence` remembers.
    law = {tuple((token, 0.0) for token in start): 1.0}
    for i in range(steps, 0, -1):
        t, time_t, time_s = i / steps, noise_time(i / steps), noise_time((i - 1) / steps)
        new_law = {}
        for held, probability in law.items():
            state = tuple(token for token, _ in held)
            alpha_t, alpha_s = alphas(state, time_t), alphas(state, time_s)
            sigma_max = np.array([min(1.0, (1 - b) / a) if a > 0 else 1.0 for a, b in zip(alpha_t, alpha_s)])
            if strategy in ("cap", "loop"):
                sigma = np.minimum(eta, sigma_max)
            else:
                sigma = (eta if strategy == "rescale" else 1) * sigma_max
            if strategy == "loop" and not t_off < t <= t_on:
                sigma = 0 * sigma
            p = untilted(model, length, time_t if conditioned else None, tuple(emitted))[index[state]]
            if tilt:
                p = p * (1 - alpha_t)
                p = p / p.sum(-1, keepdims=True)
            drawn_from = sharpen(p, temperature)
            revealed = [j for j in range(length) if state[j] != MASK and not given[j]]
            weights = {j: 1.0 for j in revealed}
            if strategy == "confidence":
                total = sum(math.exp(-held[j][1]) for j in revealed)
                weights = {j: math.exp(-held[j][1]) / total for j in revealed}
            outcomes = []
            for j, (token, psi) in enumerate(held):
                if given[j]:
                    outcomes.append([((token, psi), 1.0)])
                elif token != MASK:
                    remasked = weights[j] * sigma[token]
                    outcomes.append([((token, psi), 1 - remasked), ((MASK, 0.0), remasked)])
                else:
                    at_mask = 0 * sigma if strategy == "confidence" else sigma
                    reveal = drawn_from[j] * (alpha_s - (1 - at_mask) * alpha_t) / (1 - alpha_t)
                    remembered = p[j] if strategy == "confidence" else 0 * p[j]
                    tokens = [((k, round(remembered[k], 12)), reveal[k]) for k in emitted]
                    outcomes.append([*tokens, ((MASK, 0.0), 1 - reveal[emitted].sum())])
            for choice in itertools.product(*outcomes):
                chance = math.prod(c for _, c in choice)
                if chance > 0:
                    new = tuple(entry for entry, _ in choice)
                    new_law[new] = new_law.get(new, 0) + probability * chance
        law = new_law
    found = np.zeros(len(states))
    for held, probability in law.items():
        found[index[tuple(token for token, _ in held)]] += probability
    return found


def assert_follows(found, law, states):
    counts = np.array([(found == state).all(1).sum() for state in states])
    assert counts.sum() == len(found)
    possible = law > 1e-12
    assert counts[~possible].sum() == 0
    merged = law * len(found) >= 5  # chi-square needs a handful in every class
    observed, expected = counts[possible & merged], law[possible & merged] * len(found)
    observed = np.append(observed, counts[possible & ~merged].sum())
    expected = np.append(expected, law[possible & ~merged].sum() * len(found))
    keep = expected > 0
    p_value = chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue
    assert p_value > 1e-4, f"p = {p_value:.2g}"


def sampled(scheduler, model, length, steps, start=None, samples=SAMPLES, seed=0, **call):
    """Texts from the pipeline, `[samples, length]`."""
    if start is None:
        call["gen_length"] = length
    else:
        call["input_ids"] = torch.tensor([[CLS, *start, SEP]])
    out = pipeline_of(scheduler, model)(
        num_texts_per_prompt=samples,
        num_inference_steps=steps,
        generator=seeded(seed),
        output_type="seq",
        **call,
    )
    return torch.stack(out.sequences)[:, 1:-1].numpy()


def check_law(law_of, scheduler_class, model, length, steps, kwargs, samples=SAMPLES, start=None, **call):
    """`kwargs` are the scheduler's; of `call`, `emitted` is what can be sampled, the rest is the pipeline's."""
    conditioned = model.config.time_conditioning != "none"
    law = law_of(model, length, steps, conditioned=conditioned, start=start, **kwargs, **call)
    call.pop("emitted", None)
    scheduler = scheduler_class(**{**SCHEDULES[kwargs.get("schedule", "linear")], **kwargs})
    assert_follows(sampled(scheduler, model, length, steps, start, samples, **call), law, canvases(length))


def check_confidence_law(seed, steps, kwargs, length=3, conditioning="none", **call):
    model = model_of(seed, conditioning)
    check_law(confidence_law, ConfidenceUnmaskingScheduler, model, length, steps, kwargs, **call)


def check_remdm_law(seed, steps, kwargs, length=2, conditioning="none", **call):
    check_law(remdm_law, ReMDMScheduler, model_of(seed, conditioning), length, steps, kwargs, **call)


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


def far_apart(one, other):
    """Whether chi-square tells samples of the law `one` from those of `other`: its mean then grows by this much."""
    seen = other * SAMPLES >= 5
    return SAMPLES * ((one - other)[seen] ** 2 / other[seen]).sum() > 200


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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_remasking_by_nothing_is_ancestral(schedule, steps):
    model = model_of(REMDM_SEED)
    for strategy in ("cap", "rescale"):
        law = remdm_law(model, 2, steps, schedule=schedule, strategy=strategy, eta=0.0)
        assert np.allclose(law, exact_law(model, steps, schedule), atol=1e-12)


def test_without_eta_remdm_samples_the_ancestral_law():
    found = sampled(ReMDMScheduler(eta=0.0, **SPINDLE), model_of(REMDM_SEED), 2, 3)
    assert_follows(found, exact_law(model_of(REMDM_SEED), 3, "spindle"), canvases())


REMDM_SEED = 24
LOOP = {"t_on": 0.6, "t_off": 0.2, "alpha_on": 0.6}


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
    check_remdm_law(REMDM_SEED, steps, {"schedule": schedule, "strategy": strategy, "eta": 0.3, **LOOP})


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
    check_remdm_law(REMDM_SEED, 4, kwargs, **call)


@pytest.mark.parametrize("kwargs", [{"strategy": "confidence"}, {"strategy": "cap", "eta": 0.3}])
def test_remdm_follows_its_law_on_three_positions(kwargs):
    """Here weights of the strategy `confidence` and a mask stand side by side."""
    check_remdm_law(SEED, 3, kwargs, length=3)


@pytest.mark.parametrize(
    "kwargs", [{"strategy": "rescale", "eta": 0.3, "schedule": "cosine"}, {"strategy": "loop", "eta": 0.3, **LOOP}]
)
def test_remdm_tells_a_time_conditioned_model_how_much_is_masked(kwargs):
    check_remdm_law(REMDM_SEED, 5, kwargs, conditioning="layerwise")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_remasking_matters_to_the_toy(schedule):
    """Without this, the proofs above could pass with strategies that do nothing."""
    ancestral, *laws = (
        remdm_law(model_of(REMDM_SEED), 2, 5, schedule=schedule, strategy=strategy, eta=eta, **LOOP)
        for strategy, eta in (("cap", 0.0), ("cap", 0.3), ("rescale", 0.3), ("confidence", 0.3), ("loop", 0.3))
    )
    for law in laws:
        assert far_apart(law, ancestral)


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


# --- What changes what ---


def random_logits(rows, length, spread=2.0, seed=0):
    return torch.randn(rows, length, 8, generator=seeded(seed)) * spread


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


# --- Invariants ---


def record(pipe, prompts, **call):
    """The pipeline's output and the canvases after each forward pass."""
    canvases_seen = []

    def callback(pipe, step, timestep, kwargs):
        canvases_seen.append(kwargs["sample"].clone())

    return pipe(prompts, callback_on_step_end=callback, output_type="seq", **call).sequences, canvases_seen


PROMPTS = ["a [MASK] b", masks(20), f"{masks(5)} c b {masks(4)} a", "[MASK] a", f"b {masks(9)} c"]


def ids_of(prompts):
    return [torch.tensor(ids) for ids in toy_tokenizer()(prompts)["input_ids"]]


@pytest.mark.parametrize(
    ("name", "steps", "block_length"),
    [(name, steps, None) for name, steps in steps_for(STRATEGIES, [1, 3, 7, 20, 100])]
    + [(name, steps, 8) for name, steps in steps_for(STRATEGIES, [1, 3, 20])]
    + [(name, 1000, None) for name in ("ancestral", "count-probability", "cap")],
)
def test_no_mask_is_left_and_given_tokens_stay(name, steps, block_length):
    """Rows of unequal length, steps and blocks that do not divide them."""
    pipe = pipeline_of(scheduler_of(name))
    sequences, seen = record(pipe, PROMPTS, num_inference_steps=steps, block_length=block_length, generator=seeded())
    rows = ids_of(PROMPTS)
    for row, sequence in zip(rows, sequences, strict=True):
        assert len(sequence) == len(row)
        assert torch.equal(sequence[row != MASK], row[row != MASK])
        assert torch.isin(sequence[row == MASK], torch.tensor([5, 6, 7])).all()
    masked_at_first = [int((row == MASK).sum()) for row in rows]
    blocks = [math.ceil(n / (block_length or n)) for n in masked_at_first]
    if steps is not None:
        assert len(seen) <= steps * max(blocks)
    if name not in REMASKING and "spindle" not in name:
        assert len(seen) <= max(masked_at_first)
    before = None
    for canvas in seen:
        for row, line in zip(rows, canvas):
            assert torch.equal(line[: len(row)][row != MASK], row[row != MASK])
        if before is not None and name not in REMASKING:
            assert ((canvas == before) | (before == MASK)).all()
        before = canvas


@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [2, 5]))
def test_blocks_are_written_one_after_another(name, steps):
    """Seven positions in blocks of three: no block is begun before, or changed after, the next one's turn."""
    pipe = pipeline_of(scheduler_of(name))
    prompts = [f"a {masks(7)}", masks(7), f"b {masks(2)} b {masks(5)} c"]
    sequences, seen = record(pipe, prompts, num_inference_steps=steps, block_length=3, generator=seeded())
    for row, (given, sequence) in enumerate(zip(ids_of(prompts), sequences, strict=True)):
        assert not (sequence == MASK).any()
        columns = (given == MASK).nonzero().flatten()
        for canvas in seen:
            begun = (canvas[row, columns] != MASK).split(3)
            last = max((i for i, block in enumerate(begun) if block.any()), default=-1)
            for i in range(last):
                assert begun[i].all()
                assert torch.equal(canvas[row, columns].split(3)[i], sequence[columns].split(3)[i])


@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [3, 11]))
def test_continuations_in_blocks_leave_no_mask(name, steps):
    pipe = pipeline_of(scheduler_of(name))
    prompts = ["a [MASK] b", "", "c"]
    out = pipe(prompts, gen_length=20, block_length=8, num_inference_steps=steps, generator=seeded())
    for row, sequence in zip(ids_of(prompts), out.sequences, strict=True):
        assert not (sequence == MASK).any()
        start = row[:-1]
        assert torch.equal(sequence[: len(start)][start != MASK], start[start != MASK])


@pytest.mark.parametrize("name", REMASKING)
def test_remdm_takes_tokens_back_but_none_of_the_prompt(name):
    pipe = pipeline_of(scheduler_of(name, eta=0.5))
    prompts = [f"a {masks(8)} b a {masks(6)} c", masks(17)]
    _, seen = record(pipe, prompts, num_texts_per_prompt=5, num_inference_steps=30, generator=seeded())
    taken_back = torch.stack([(a != MASK) & (b == MASK) for a, b in zip(seen, seen[1:])]).any(0)
    for row, ids in enumerate(ids for ids in ids_of(prompts) for _ in range(5)):
        assert taken_back[row, : len(ids)][ids == MASK].any()
        assert not taken_back[row, : len(ids)][ids != MASK].any()


def test_steps_in_which_nothing_is_revealed_cost_no_forward_pass():
    for kwargs in ({"eta": 0.0}, {"eta": 0.0, "strategy": "rescale"}):
        pipe = pipeline_of(ReMDMScheduler(**kwargs))
        _, seen = record(pipe, masks(5), num_inference_steps=1000, generator=seeded())
        assert len(seen) <= 5
    pipe = pipeline_of(ReMDMScheduler(eta=0.002))
    _, seen = record(pipe, masks(5), num_inference_steps=1000, generator=seeded())
    assert 5 < len(seen) < 200


@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [3, 9]))
def test_greedy_batch_equals_each_prompt_alone(name, steps):
    pipe = pipeline_of(scheduler_of(name))
    prompts = ["a", "b [MASK] c a b", "c c", "a b c a b c [MASK]"]
    arguments = {"gen_length": 5, "temperature": 0.0, "num_inference_steps": steps}
    together = pipe(prompts, generator=[seeded(i) for i in range(4)], **arguments)
    for i, prompt in enumerate(prompts):
        alone = pipe(prompt, generator=[seeded(i)], **arguments)
        assert alone.sequences[0].tolist() == together.sequences[i].tolist()


@pytest.mark.parametrize("block_length", [None, 4])
@pytest.mark.parametrize(("name", "steps"), steps_for(STRATEGIES, [5]))
def test_one_generator_a_row_gives_the_same_text_in_any_batch_split(name, steps, block_length):
    pipe = pipeline_of(scheduler_of(name))

    def texts(rows):
        return pipe(
            [["a", "b [MASK] c", "c c a"][i % 3] for i in rows],
            gen_length=6,
            generator=[seeded(i) for i in rows],
            num_inference_steps=steps,
            block_length=block_length,
        ).texts

    assert texts(range(6)) == texts([0]) + texts([1, 2, 3]) + texts([4, 5])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_scheduler_that_ran_before_runs_as_a_new_one(name):
    steps = 5 if steps_allowed(name)[0] else None
    scheduler, logits = scheduler_of(name), random_logits(2, 6)
    finals = []
    for sample in (torch.full((1, 6), MASK), torch.full((2, 6), MASK), torch.full((2, 6), MASK)):
        for _, after, _ in run(scheduler, sample, steps, logits[: len(sample)], seeded()):
            final = after
        finals.append(final)
    for _, after, _ in run(scheduler_of(name), torch.full((2, 6), MASK), steps, logits, seeded()):
        final = after
    assert torch.equal(finals[1], finals[2])
    assert torch.equal(finals[2], final)


# --- Loops of one's own ---


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("name", [name for name in STRATEGIES if steps_allowed(name)[0]])
def test_own_loop_leaves_no_mask(name, steps):
    scheduler, logits = scheduler_of(name), random_logits(3, 6)
    sample = torch.full((3, 6), MASK)
    sample[1, 2:4] = 6
    sample[2, :] = 5
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        output = scheduler.step(logits, t, sample, generator=seeded())
        assert not (output.pred_original_sample == MASK).any()
        sample = output.prev_sample
    assert not torch.isin(sample, torch.tensor([0, 1, 2, MASK])).any()
    assert sample[1, 2:4].tolist() == [6, 6]
    assert sample[2].tolist() == [5] * 6


@pytest.mark.parametrize("name", ["count-probability", "count-margin", "threshold", "entropy_bound"])
def test_own_loop_without_steps_leaves_no_mask(name):
    scheduler, logits = scheduler_of(name), random_logits(3, 6)
    sample = torch.full((3, 6), MASK)
    sample[1, 2:] = 6
    scheduler.set_timesteps(None)
    passes = 0
    while (sample == MASK).any():
        before = sample
        sample = scheduler.step(logits, 1.0, sample, generator=seeded()).prev_sample
        newly = ((before == MASK) & (sample != MASK)).sum(1)
        assert (newly[(before == MASK).any(1)] >= 1).all()
        assert ((sample == before) | (before == MASK)).all()
        passes += 1
    assert passes <= 6
    assert sample[1, 2:].tolist() == [6] * 4


def own_loop(scheduler, model, length, steps):
    generator = seeded()
    sample = torch.tensor([[CLS, *[MASK] * length, SEP]]).repeat(SAMPLES, 1)
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        with torch.no_grad():
            logits = model(sample).logits
        sample = scheduler.step(logits, t, sample, generator=generator).prev_sample
    return sample[:, 1:-1].numpy()


@pytest.mark.parametrize("kwargs", [{}, {"position_temperature": 0.7, "schedule": "cosine"}])
def test_own_loop_of_confidence_unmasking_follows_the_same_law(kwargs):
    found = own_loop(ConfidenceUnmaskingScheduler(**IDS, **kwargs), model_of(SEED), 3, 3)
    assert_follows(found, confidence_law(model_of(SEED), 3, 3, **kwargs), canvases(3))


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [("cap", "linear"), ("rescale", "spindle"), ("confidence", "spindle"), ("loop", "cosine")],
)
def test_own_loop_of_remdm_follows_the_same_law(strategy, schedule):
    kwargs = {"strategy": strategy, "eta": 0.3, **LOOP}
    found = own_loop(ReMDMScheduler(**IDS, **SCHEDULES[schedule], **kwargs), model_of(REMDM_SEED), 2, 5)
    assert_follows(found, remdm_law(model_of(REMDM_SEED), 2, 5, schedule=schedule, **kwargs), canvases())


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("sizes_of", [lambda n: [1] * n, lambda n: [n // 2, 0, n - n // 2]], ids=["ones", "halves"])
def test_pieces_of_logits_give_what_the_whole_gives(name, sizes_of):
    scheduler, logits = scheduler_of(name), random_logits(2, 6).flatten(0, 1)

    def canvases_of(pieces_of):
        sample, generator, found = torch.full((2, 6), MASK), seeded(), []
        scheduler.set_timesteps(3 if steps_allowed(name)[0] else None)
        while True:
            positions, times = scheduler.next_positions(sample, generator)
            if not len(positions):
                return found
            asked = pieces_of(logits[positions])
            output = scheduler.step(asked, times, sample, positions=positions, generator=generator)
            sample = output.prev_sample
            found += [sample.tolist(), output.pred_original_sample.tolist()]

    whole = canvases_of(lambda asked: asked)
    assert canvases_of(lambda asked: iter(asked.split(sizes_of(len(asked))))) == whole


@pytest.mark.parametrize("name", STRATEGIES)
def test_tuple_output_and_passed_logits(name):
    scheduler, logits = scheduler_of(name), random_logits(1, 3)
    scheduler.set_timesteps(2 if steps_allowed(name)[0] else None)
    sample = torch.full((1, 3), MASK)
    positions, times = scheduler.next_positions(sample, seeded())
    asked = logits.flatten(0, 1)[positions]
    output = scheduler.step(asked, times, sample, positions=positions, generator=seeded(), return_dict=False)
    assert [x.shape for x in output[:2]] == [(1, 3), (1, 3)]
    assert output[2] is asked
    assert (sample == MASK).all()


# --- Exchange ---

CLASSES = [AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler]
CHAINS = list(itertools.permutations(CLASSES))
SHARED = {**IDS, **SPINDLE, "spindle_lambda": 0.5, "corpus": "toy", "top_k": 3, "gen_length": 17, "tilt": False}
OWN = {
    AbsorbingStateScheduler: {},
    ConfidenceUnmaskingScheduler: {
        "criterion": "entropy",
        "rule": "threshold",
        "threshold": 0.4,
        "entropy_bound": 0.7,
        "position_temperature": 0.3,
    },
    ReMDMScheduler: {"strategy": "loop", "eta": 0.3, "t_on": 0.7, "t_off": 0.2, "alpha_on": 0.8},
}


@pytest.fixture
def no_warnings(caplog):
    """Fails the test when diffusers, or the library, warns."""
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield
    diffusers.utils.logging.disable_propagation()
    assert [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING] == []


def settings_of(scheduler):
    return {name: value for name, value in scheduler.config.items() if not name.startswith("_")}


def assert_has(scheduler, settings):
    assert {name: scheduler.config[name] for name in settings} == settings


def test_the_fixture_sees_what_diffusers_warns_of(caplog):
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        AbsorbingStateScheduler.from_config({**AbsorbingStateScheduler().config, "no_such_setting": 1})
    diffusers.utils.logging.disable_propagation()
    assert "no_such_setting" in caplog.text


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(c.__name__[:7] for c in chain))
def test_round_trips_through_all_classes_keep_everything(chain, no_warnings):
    first = chain[0](**SHARED, **OWN[chain[0]])
    scheduler = first
    for scheduler_class in [*chain[1:], *chain[::-1], chain[0]]:
        scheduler = scheduler_class.from_config(scheduler.config)
        assert type(scheduler) is scheduler_class
        assert_has(scheduler, SHARED)
        if scheduler_class is chain[0]:
            assert_has(scheduler, OWN[chain[0]])
        else:  # what was never said is by default
            assert_has(
                scheduler, {k: v for k, v in settings_of(scheduler_class()).items() if k in OWN[scheduler_class]}
            )
    assert settings_of(scheduler).items() >= settings_of(first).items()


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(c.__name__[:7] for c in chain))
def test_settings_said_on_the_way_are_kept(chain, no_warnings):
    scheduler = chain[0](**SHARED, **OWN[chain[0]])
    for scheduler_class in chain[1:]:
        scheduler = scheduler_class.from_config(scheduler.config, **OWN[scheduler_class])
    for scheduler_class in chain:
        scheduler = scheduler_class.from_config(scheduler.config)
        assert_has(scheduler, {**SHARED, **OWN[scheduler_class]})


def test_schedulers_know_each_other():
    for scheduler_class in CLASSES:
        assert set(scheduler_class().compatibles) == set(CLASSES)


def arguments_for(scheduler):
    """Steps that a scheduler of `OWN` takes."""
    return {"num_inference_steps": 5 if isinstance(scheduler, ReMDMScheduler) else None}


def test_strategies_of_a_pipeline_are_exchanged(no_warnings):
    pipe = pipeline_of(AbsorbingStateScheduler(**SPINDLE))
    for scheduler_class in (*CLASSES, *CLASSES[::-1]):
        pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config, **OWN[scheduler_class])
        assert_has(pipe.scheduler, {**IDS, **SPINDLE, **OWN[scheduler_class]})
        sequence = pipe("a [MASK] b", gen_length=6, **arguments_for(pipe.scheduler)).sequences[0]
        assert not (sequence == MASK).any()


@pytest.mark.parametrize("saved", CLASSES)
def test_saved_pipelines_come_back_and_every_class_loads_their_scheduler(saved, tmp_path, no_warnings):
    pipe = pipeline_of(saved(**SHARED, **OWN[saved]))
    call = {"gen_length": 6, "num_texts_per_prompt": 3, **arguments_for(pipe.scheduler)}
    texts = pipe(generator=seeded(), **call).texts
    pipe.save_pretrained(tmp_path)
    loaded = TextDiffusionPipeline.from_pretrained(tmp_path)
    assert type(loaded.scheduler) is saved
    assert settings_of(loaded.scheduler) == settings_of(pipe.scheduler)
    loaded.set_progress_bar_config(disable=True)
    assert loaded(generator=seeded(), **call).texts == texts
    for scheduler_class in CLASSES:
        for place in ((tmp_path / "scheduler", {}), (tmp_path, {"subfolder": "scheduler"})):
            scheduler = scheduler_class.from_pretrained(place[0], **place[1])
            assert type(scheduler) is scheduler_class
            assert_has(scheduler, SHARED)
        scheduler.save_pretrained(tmp_path / "again")
        assert_has(saved.from_pretrained(tmp_path / "again"), {**SHARED, **OWN[saved]})
        other = TextDiffusionPipeline.from_pretrained(tmp_path, scheduler=scheduler)
        assert type(other.scheduler) is scheduler_class


# --- Errors ---

CONFIDENCE, REMASK = ConfidenceUnmaskingScheduler, ReMDMScheduler
NO_NUMBERS = ["0.5", None, math.nan, True]


@pytest.mark.parametrize(
    ("scheduler_class", "kwargs", "message"),
    [
        (CONFIDENCE, {"criterion": "random"}, "`criterion` must be one of .*probability.* got 'random'"),
        (CONFIDENCE, {"criterion": None}, "`criterion` must be one of"),
        (CONFIDENCE, {"rule": "topk"}, "`rule` must be one of .*count.* got 'topk'"),
        (CONFIDENCE, {"threshold": 1.0}, "`threshold` must .* got 1.0"),
        (CONFIDENCE, {"threshold": -0.1}, "`threshold` must .* got -0.1"),
        (CONFIDENCE, {"entropy_bound": -1.0}, "`entropy_bound` must .* got -1.0"),
        (CONFIDENCE, {"entropy_bound": math.inf}, "`entropy_bound` must .* got inf"),
        (CONFIDENCE, {"position_temperature": -1.0}, "`position_temperature` must .* got -1.0"),
        (REMASK, {"strategy": "uniform"}, "`strategy` must be one of .*rescale.* got 'uniform'"),
        (REMASK, {"eta": 1.5}, "`eta` must .* got 1.5"),
        (REMASK, {"eta": -0.5}, "`eta` must .* got -0.5"),
        (REMASK, {"t_on": 1.0}, "t_on.* must .*got .*1.0"),
        (REMASK, {"t_off": 0.0}, "t_off.* must .*got 0.0"),
        (REMASK, {"t_on": 0.2, "t_off": 0.2}, "t_off < t_on.* must .*got 0.2 and 0.2"),
        (REMASK, {"alpha_on": 1.0}, "`alpha_on` must .* got 1.0"),
        (REMASK, {"alpha_on": 0.0}, "`alpha_on` must .* got 0.0"),
        *[
            (scheduler_class, {name: value}, f"{name}.* must .*{value}")
            for scheduler_class, names in (
                (CONFIDENCE, ["threshold", "entropy_bound", "position_temperature"]),
                (REMASK, ["eta", "t_on", "t_off", "alpha_on"]),
            )
            for name in names
            for value in NO_NUMBERS
        ],
        (CONFIDENCE, {"schedule": "sigmoid"}, "`schedule` must be one of"),
        (REMASK, {"schedule": "spindle"}, "count_tokens"),
        (CONFIDENCE, {"temperature": -1.0}, "`temperature` must be"),
        (REMASK, {"mask_token_id": -1}, "`mask_token_id` must be"),
    ],
)
def test_wrong_settings_are_named(scheduler_class, kwargs, message):
    with pytest.raises(ValueError, match=message):
        scheduler_class(**kwargs)


def test_wrong_numbers_of_steps_are_named():
    for name in ("threshold", "entropy_bound"):
        pipe = pipeline_of(scheduler_of(name))
        with pytest.raises(ValueError, match=f"`num_inference_steps` must be None with .*{name}.* got 4"):
            pipe(gen_length=4, num_inference_steps=4)
        with pytest.raises(ValueError, match="`num_inference_steps` must be None"):
            pipe.scheduler.set_timesteps(4)
    for name in REMASKING:
        pipe = pipeline_of(scheduler_of(name))
        with pytest.raises(ValueError, match="`num_inference_steps` must be an integer >= 1"):
            pipe(gen_length=4)
        with pytest.raises(ValueError, match="`num_inference_steps` must be an integer >= 1"):
            pipe.scheduler.set_timesteps()
    for name in STRATEGIES:
        for steps in (0, -1, 3.5, True, "5"):
            with pytest.raises(ValueError, match="`num_inference_steps` must be"):
                scheduler_of(name).set_timesteps(steps)


@pytest.mark.parametrize("name", STRATEGIES)
def test_wrong_calls_are_named(name):
    scheduler = scheduler_of(name)
    sample = torch.full((2, 3), MASK)
    steps = 4 if steps_allowed(name)[0] else None
    scheduler.set_timesteps(steps)
    if steps is not None:
        with pytest.raises(ValueError, match="one of `scheduler.timesteps`"):
            scheduler.step(torch.zeros(2, 3, 8), 0.3, sample)
        with pytest.raises(ValueError, match="`logits` must have shape"):
            scheduler.step(torch.zeros(2, 4, 8), 1.0, sample)

    def step(logits, sample=sample, **kwargs):
        scheduler.set_timesteps(steps)
        positions, times = scheduler.next_positions(sample, seeded())
        return scheduler.step(logits[: len(positions)], times, sample, positions=positions, **kwargs)

    with pytest.raises(ValueError, match="`logits` hold NaN"):
        step(torch.full((6, 8), math.nan))
    with pytest.raises(ValueError, match="infinity"):
        step(torch.full((6, 8), math.inf))
    with pytest.raises(ValueError, match="`logits` must have"):
        step(torch.zeros(0, 8))
    with pytest.raises(ValueError, match="`top_p`"):
        step(torch.zeros(6, 8), top_p=0.0)
    with pytest.raises(ValueError, match="`temperature`"):
        step(torch.zeros(6, 8), temperature=-1.0)
    with pytest.raises(ValueError, match="LongTensor"):
        scheduler.next_positions(sample.float())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_canvas_of_another_batch_is_named(name):
    scheduler, sample = scheduler_of(name), torch.full((2, 3), MASK)
    scheduler.set_timesteps(4 if steps_allowed(name)[0] else None)
    scheduler.next_positions(sample)
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.next_positions(sample[:1])


@pytest.mark.parametrize("name", [name for name in REMASKING if "spindle" not in name] + ["count-margin"])
def test_a_canvas_of_another_batch_is_named_by_a_loop_of_ones_own(name):
    """These strategies know where they began."""
    scheduler, sample = scheduler_of(name), torch.full((2, 3), MASK)
    scheduler.set_timesteps(4)
    sample = scheduler.step(torch.zeros(2, 3, 8), 1.0, sample, generator=seeded()).prev_sample
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.step(torch.zeros(1, 3, 8), 0.75, sample[:1])
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.step(torch.zeros(4, 3, 8), 0.75, sample.repeat(2, 1))


@pytest.mark.parametrize("name", STRATEGIES)
def test_positions_that_were_not_asked_for_are_named(name):
    steps = 4 if steps_allowed(name)[0] else None
    scheduler, sample = scheduler_of(name), torch.full((1, 3), MASK)
    sample[0, 0] = 5
    scheduler.set_timesteps(steps)
    with pytest.raises(ValueError, match="`positions` must be those of the last `next_positions`"):
        scheduler.step(torch.zeros(1, 8), torch.ones(1), sample, positions=torch.tensor([1]))
    _, times = scheduler.next_positions(sample)
    with pytest.raises(ValueError, match="`positions` must be those of the last `next_positions`"):
        scheduler.step(torch.zeros(1, 8), times, sample, positions=torch.tensor([0]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_samples_of_a_wrong_kind_are_named_by_a_loop_of_ones_own(name):
    scheduler = scheduler_of(name)
    for sample in (torch.full((2, 3), float(MASK)), torch.full((3,), MASK)):
        scheduler.set_timesteps(4 if steps_allowed(name)[0] else None)
        with pytest.raises(ValueError, match="`sample` must be a LongTensor"):
            scheduler.step(torch.zeros(*sample.shape, 8), 1.0, sample)


@pytest.mark.parametrize("name", REMASKING)
def test_remdm_without_steps_names_them(name):
    """Before `set_timesteps`, too."""
    sample = torch.full((2, 3), MASK)
    with pytest.raises(ValueError, match="num_inference_steps|set_timesteps"):
        scheduler_of(name).next_positions(sample)
    with pytest.raises(ValueError, match="num_inference_steps|set_timesteps"):
        scheduler_of(name).step(torch.zeros(2, 3, 8), 1.0, sample)


# --- The same, with more of everything ---


@pytest.mark.slow
@pytest.mark.parametrize("seed", [204, 337])
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
def test_confidence_laws_hold_for_more_samples(kwargs, steps, criterion, position_temperature, temperature, seed):
    kwargs = {**kwargs, "criterion": criterion, "position_temperature": position_temperature}
    check_confidence_law(seed, steps, kwargs, samples=50_000, temperature=temperature)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STRATEGIES if steps_allowed(name)[0]])
def test_a_thousand_steps_leave_no_mask(name):
    sequences, _ = record(pipeline_of(scheduler_of(name)), PROMPTS, num_inference_steps=1000, generator=seeded())
    for row, sequence in zip(ids_of(PROMPTS), sequences, strict=True):
        assert torch.equal(sequence[row != MASK], row[row != MASK])
        assert not (sequence == MASK).any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [6, 24])
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
def test_remdm_laws_hold_for_more_samples(kwargs, schedule, steps, seed):
    check_remdm_law(seed, steps, {**kwargs, "schedule": schedule}, samples=200_000)
