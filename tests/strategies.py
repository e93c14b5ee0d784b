"""Every strategy of the reverse process, and its law state by state, in plain floats."""

import functools
import itertools
import math

import numpy as np
import torch
from toys import (
    CLS,
    COUNTS,
    EMITTED,
    MASK,
    SEP,
    assert_follows,
    canvases,
    g_of,
    model_probabilities,
    seeded,
    toy_model,
    toy_tokenizer,
)

from diffusers_text import AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler, TextDiffusionPipeline

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


def far_apart(one, other):
    """Whether chi-square tells samples of the law `one` from those of `other`: its mean then grows by this much."""
    seen = other * SAMPLES >= 5
    return SAMPLES * ((one - other)[seen] ** 2 / other[seen]).sum() > 200


def random_logits(rows, length, spread=2.0, seed=0):
    return torch.randn(rows, length, 8, generator=seeded(seed)) * spread


def own_loop(scheduler, model, length, steps):
    generator = seeded()
    sample = torch.tensor([[CLS, *[MASK] * length, SEP]]).repeat(SAMPLES, 1)
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        with torch.no_grad():
            logits = model(sample).logits
        sample = scheduler.step(logits, t, sample, generator=generator).prev_sample
    return sample[:, 1:-1].numpy()
