"""
The bounds: against a literal transcription, against exact likelihoods by enumeration, and at the edges of number
formats.
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from toys import CLS, COUNTS, EMITTED, LENGTH, MASK, SEP, canvases, exact_law, g_of, spindle_h, toy_model

from diffusers_text import (
    AbsorbingStateScheduler,
    continuous_time_bound,
    discrete_time_bound,
    losses,
    masked_count_bound,
)
from diffusers_text.losses import SubsPrediction, continuous_time_terms

VOCAB = len(COUNTS)
SPINDLE = {"schedule": "spindle", "token_counts": COUNTS}
SCHEDULES = ["linear", "cosine", "polynomial", "geometric"]


def scheduler_of(**kwargs):
    return AbsorbingStateScheduler(mask_token_id=MASK, vocab_size=VOCAB, suppressed_token_ids=[0, 1, 2], **kwargs)


# --- A literal, slow transcription of the formulas: one position, one token at a time, plain floats ---


def transcribed_h(row, kind, lam, sentence):
    """h of every id, as the row `row` (clean or partly masked) determines it."""
    if not sentence:
        return spindle_h(kind, lam)
    total = sum(COUNTS)
    information = [-math.log(max(n, 1) / total) for n in COUNTS]
    corpus = sum(n / total * i for n, i in zip(COUNTS, information))
    seen = [corpus if x == MASK else information[x] for x in row if x not in (0, 1, 2)]
    mean, limit = sum(seen) / len(seen), 0.95 / (math.pi * lam)
    return [min(max(1 - mean / i, -limit), limit) for i in information]


def transcribed_bound(
    logits, clean, noisy, times, *, steps=None, kind="surprisal", lam=0.3, tilt=True, sentence=False
):
    total = 0.0
    for b in range(len(clean)):
        t = times[b]
        true_h = transcribed_h(clean[b], kind, lam, sentence)
        h = transcribed_h(noisy[b], kind, lam, sentence)
        for position in range(len(clean[b])):
            if noisy[b][position] != MASK:
                continue
            x = clean[b][position]

            def g(time, offset):
                return time + lam * math.sin(math.pi * time) * offset

            def rate(offset):
                return (1 + lam * math.pi * math.cos(math.pi * t) * offset) / g(t, offset)

            weights = [
                0.0 if k == MASK else math.exp(logits[b][position][k]) * (g(t, h[k]) if tilt else 1.0)
                for k in range(VOCAB)
            ]
            p = [weight / sum(weights) for weight in weights]
            if steps is None:
                r, rr = rate(true_h[x]), rate(h[x])
                total += -r * math.log(p[x]) + r * math.log(r / rr) - r + sum(p[k] * rate(h[k]) for k in range(VOCAB))
                continue
            s = t - 1 / steps
            v = g(s, true_h[x]) / g(t, true_h[x]) if s > 1e-9 else 0.0
            vv = [g(s, h[k]) / g(t, h[k]) if s > 1e-9 else 0.0 for k in range(VOCAB)]
            nats = -(1 - v) * math.log(p[x] * (1 - vv[x]) / (1 - v))
            if v > 0:
                nats += v * (math.log(v) - math.log(sum(p[k] * vv[k] for k in range(VOCAB))))
            total += steps * nats
    return total


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"tilt": False},
        {"kind": "log_count", "lam": 0.8},
        {"sentence": True},
        {"sentence": True, "tilt": False},
    ],
)
def test_spindle_bounds_equal_a_literal_transcription(kwargs, steps):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 6, VOCAB, generator=generator, dtype=torch.float64) * 2
    clean = torch.randint(5, VOCAB, (4, 6), generator=generator)
    clean[:, -1] = SEP
    times = torch.tensor([0.25, 0.5, 0.75, 1.0])
    noisy = torch.where(torch.rand(4, 6, generator=generator) < times[:, None], MASK, clean)
    scheduler = scheduler_of(
        **SPINDLE,
        spindle_lambda=kwargs.get("lam", 0.3),
        spindle_information=kwargs.get("kind", "surprisal"),
        spindle_mean="sentence" if kwargs.get("sentence") else "corpus",
        tilt=kwargs.get("tilt", True),
    )
    expected = transcribed_bound(
        logits.tolist(), clean.tolist(), noisy.tolist(), times.tolist(), steps=steps, **kwargs
    )
    if steps is None:
        ours = continuous_time_bound(scheduler, logits, clean, noisy, times, reduction="sum")
    else:
        ours = discrete_time_bound(scheduler, logits, clean, noisy, times, steps, reduction="sum")
    assert ours.item() == pytest.approx(expected, abs=1e-6)
    assert (noisy == MASK).sum() > 8


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_token_independent_bounds_equal_a_literal_transcription(schedule, steps):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5, VOCAB, generator=generator, dtype=torch.float64)
    clean = torch.randint(5, VOCAB, (2, 5), generator=generator)
    noisy = clean.clone()
    noisy[0, :3] = noisy[1, 2:] = MASK
    expected = 0.0
    for b, t in enumerate([0.25, 0.75]):
        if steps is None:
            step = 1e-6
            weight = (g_of(schedule, t + step)[0] - g_of(schedule, t - step)[0]) / (2 * step) / g_of(schedule, t)[0]
        else:
            weight = steps * (1 - g_of(schedule, t - 1 / steps)[0] / g_of(schedule, t)[0])
        for position in range(5):
            if noisy[b, position] == MASK:
                scores = logits[b, position].tolist()
                normalizer = sum(math.exp(score) for k, score in enumerate(scores) if k != MASK)
                expected += -weight * (scores[clean[b, position]] - math.log(normalizer))
    times = torch.tensor([0.25, 0.75])
    scheduler = scheduler_of(schedule=schedule)
    if steps is None:
        ours = continuous_time_bound(scheduler, logits, clean, noisy, times, reduction="sum")
    else:
        ours = discrete_time_bound(scheduler, logits, clean, noisy, times, steps, reduction="sum")
    assert ours.item() == pytest.approx(expected, rel=1e-6)


# --- Exact likelihoods: every clean text of two tokens, every mask pattern ---


class Enumeration:
    """
    All clean texts with all their mask patterns, and a model's logits of each: the bound's expectation is a sum over
    them.
    """

    def __init__(self, model):
        self.texts = canvases()[(canvases() != MASK).all(1)]
        self.patterns = np.array(list(itertools.product([False, True], repeat=LENGTH)))
        clean = np.repeat(self.texts, len(self.patterns), axis=0)
        self.masked = np.tile(self.patterns, (len(self.texts), 1))
        pad = lambda rows: torch.tensor(np.column_stack([np.full(len(rows), CLS), rows, np.full(len(rows), SEP)]))  # noqa: E731
        self.clean, self.noisy = pad(clean), pad(np.where(self.masked, MASK, clean))
        self.raw = clean
        self.model = model

    def logits(self, t):
        times = (
            {} if self.model.config.time_conditioning == "none" else {"timesteps": torch.full((len(self.clean),), t)}
        )
        with torch.no_grad():
            logits = self.model(self.noisy, **times).logits.double()
        # Exact texts hold emitted tokens only, so that likelihoods sum to one over them.
        ruled_out = [k for k in range(VOCAB) if k not in EMITTED]
        logits[..., ruled_out] = -torch.inf
        return logits

    def expected(self, estimate, t, schedule, **kwargs):
        """E over masks at time t of `estimate(logits, clean, noisy, times) -> [rows]`, for each text."""
        g = g_of(schedule, t, **kwargs)[self.raw]
        weights = np.where(self.masked, g, 1 - g).prod(1)
        nats = estimate(self.logits(t), self.clean, self.noisy, torch.full((len(self.clean),), t)).numpy()
        return np.where(weights > 0, weights * nats, 0).reshape(len(self.texts), -1).sum(1)


def exact_discrete_bound(model, steps, schedule, scheduler):
    enumeration = Enumeration(model)
    return (
        sum(
            enumeration.expected(
                lambda *args: discrete_time_bound(scheduler, *args, steps, reduction="none"), i / steps, schedule
            )
            for i in range(1, steps + 1)
        )
        / steps
    )


def exact_continuous_bound(model, schedule, scheduler, points=60):
    enumeration = Enumeration(model)
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return sum(
        weight
        / 2
        * enumeration.expected(
            lambda *args: continuous_time_bound(scheduler, *args, reduction="none"), (node + 1) / 2, schedule
        )
        for node, weight in zip(nodes, weights)
    )


def negative_log_likelihood(model, steps, schedule, **kwargs):
    states = canvases()
    law = exact_law(model, steps, schedule, **kwargs)
    return -np.log(law[(states != MASK).all(1)])


@pytest.mark.parametrize("schedule", [*SCHEDULES, "spindle"])
@pytest.mark.parametrize("conditioning", ["none", "layerwise"])
@pytest.mark.parametrize("tilt", [True, False])
def test_exact_negative_log_likelihood_never_exceeds_the_matching_bound(schedule, conditioning, tilt):
    model = toy_model(time_conditioning=conditioning)
    scheduler = scheduler_of(schedule=schedule, token_counts=COUNTS, tilt=tilt)
    exact = negative_log_likelihood(model, 3, schedule, conditioned=conditioning != "none", tilt=tilt)
    bound = exact_discrete_bound(model, 3, schedule, scheduler)
    assert (exact <= bound + 1e-6).all()
    assert (bound - exact).min() < 1  # and it is tight enough to mean something


@pytest.mark.parametrize("schedule", ["linear", "spindle"])
def test_exact_negative_log_likelihood_never_exceeds_the_continuous_bound(schedule):
    model = toy_model()
    exact = negative_log_likelihood(model, 2000, schedule, midpoint=True)
    bound = exact_continuous_bound(model, schedule, scheduler_of(schedule=schedule, token_counts=COUNTS))
    assert (exact <= bound + 1e-4).all()


def test_spindle_without_its_second_term_is_no_bound():
    """The term that most code leaves out is what makes the spindle's loss a bound."""
    model = toy_model()
    scheduler = scheduler_of(**SPINDLE)
    enumeration = Enumeration(model)

    def without(logits, clean, noisy, times):
        log_p = logits.masked_fill(torch.arange(VOCAB) == MASK, -torch.inf)
        h = scheduler.noise.vocabulary_offsets(VOCAB, noisy, noisy.device)
        log_p = (log_p + scheduler.noise.g(times[:, None, None].double(), h).log()).log_softmax(-1)
        nats = -scheduler.unmasking_rate(times.double(), clean) * log_p.gather(-1, clean[..., None]).squeeze(-1)
        return nats.masked_fill(noisy != MASK, 0).sum(1)

    nodes, weights = np.polynomial.legendre.leggauss(60)
    crippled = sum(w / 2 * enumeration.expected(without, (x + 1) / 2, "spindle") for x, w in zip(nodes, weights))
    exact = negative_log_likelihood(model, 2000, "spindle", midpoint=True)
    assert (crippled < exact - 1e-2).any()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
def test_the_bound_in_steps_converges_to_the_continuous_one(schedule):
    model = toy_model()
    scheduler = scheduler_of(schedule=schedule, token_counts=COUNTS)
    continuous = exact_continuous_bound(model, schedule, scheduler)
    errors = [
        np.abs(exact_discrete_bound(model, steps, schedule, scheduler) - continuous).max() for steps in (25, 50, 100)
    ]
    assert errors[2] < 0.02 * continuous.mean()
    for coarse, fine in zip(errors, errors[1:]):
        assert fine < 0.6 * coarse  # first order in 1 / T


def test_every_token_independent_schedule_has_the_same_continuous_bound():
    model = toy_model()
    reference = exact_continuous_bound(model, "linear", scheduler_of())
    for schedule in SCHEDULES[1:]:
        other = exact_continuous_bound(model, schedule, scheduler_of(schedule=schedule), points=200)
        np.testing.assert_allclose(other, reference, rtol=1e-5)


# --- Edges ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ["none", "all", "some"])
@pytest.mark.parametrize("kwargs", [{}, SPINDLE, {**SPINDLE, "tilt": False}, {**SPINDLE, "spindle_mean": "sentence"}])
@pytest.mark.parametrize("steps", [None, 1000])
def test_mean_loss_and_gradients_are_finite(dtype, masks, kwargs, steps):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(5, VOCAB, (2, 16), generator=generator)
    masked = {
        "none": torch.zeros(2, 16),
        "all": torch.ones(2, 16),
        "some": torch.rand(2, 16, generator=generator) < 0.5,
    }
    noisy = clean.masked_fill(masked[masks].bool(), MASK)
    for t in (1e-5, 0.5, 1.0) if steps is None else (1 / steps, 0.5, 1.0):
        logits = torch.randn(2, 16, VOCAB, generator=generator).to(dtype).requires_grad_()
        times = torch.full((2,), t)
        if steps is None:
            loss = continuous_time_bound(scheduler_of(**kwargs), logits, clean, noisy, times)
        else:
            loss = discrete_time_bound(scheduler_of(**kwargs), logits, clean, noisy, times, steps)
        loss.backward()
        assert loss.isfinite()
        assert logits.grad.isfinite().all()
        assert (loss == 0) == (masks == "none")
        if masks == "all":
            assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize("kwargs", [{}, SPINDLE, {**SPINDLE, "tilt": False}, {**SPINDLE, "spindle_mean": "sentence"}])
@pytest.mark.parametrize("steps", [None, 4])
def test_a_single_masked_token_counts_the_same_alone(kwargs, steps):
    """Shapes [1, vocab] stand for one position and for all: both are right where there is one."""
    scheduler = scheduler_of(**kwargs)
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    clean = torch.tensor([[5, 6, 7], [6, 6, 5]])
    noisy = clean.masked_fill(torch.tensor([[0, 1, 0], [1, 0, 1]]).bool(), MASK)
    call = continuous_time_bound if steps is None else partial(discrete_time_bound, num_steps=steps)
    both = call(scheduler, logits, clean, noisy, torch.tensor([0.5, 1.0]), reduction="none")
    alone = call(scheduler, logits[:1], clean[:1], noisy[:1], torch.tensor([0.5]), reduction="none")
    torch.testing.assert_close(alone, both[:1])


def test_positions_and_reductions_agree():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, VOCAB, generator=generator, dtype=torch.float64)
    clean = torch.randint(5, VOCAB, (2, 6), generator=generator)
    noisy = clean.masked_fill(torch.rand(2, 6, generator=generator) < 0.5, MASK)
    maskable = torch.ones(2, 6, dtype=torch.bool)
    maskable[:, 0] = False
    times = torch.tensor([0.4, 0.9])
    scheduler = scheduler_of(**SPINDLE)
    full = continuous_time_bound(scheduler, logits, clean, noisy, times, reduction="sum")
    positions = (noisy == MASK).flatten().nonzero().flatten()
    args = (scheduler, logits.flatten(0, 1)[positions], clean, noisy, times)
    torch.testing.assert_close(continuous_time_bound(*args, positions=positions, reduction="sum"), full)
    torch.testing.assert_close(continuous_time_bound(*args, positions=positions, reduction="none").sum(), full)
    torch.testing.assert_close(continuous_time_bound(*args, positions=positions, maskable=maskable), full / 10)


@pytest.mark.parametrize("kwargs", [{}, SPINDLE])
def test_a_mask_in_the_clean_text_is_no_target(kwargs):
    logits, times = torch.randn(1, 3, VOCAB, requires_grad=True), torch.tensor([0.5])
    noisy = torch.tensor([[MASK, 6, MASK]])
    both = continuous_time_bound(
        scheduler_of(**kwargs), logits, torch.tensor([[5, 6, MASK]]), noisy, times, reduction="sum"
    )
    alone = continuous_time_bound(
        scheduler_of(**kwargs), logits[:, :1], torch.tensor([[5]]), noisy[:, :1], times, reduction="sum"
    )
    torch.testing.assert_close(both, alone)
    (gradient,) = torch.autograd.grad(both, logits)
    assert gradient.isfinite().all()
    assert (gradient[0, 2] == 0).all()


def test_hybrid_cross_entropy_has_the_unit_of_one_step():
    """D3PM adds 0.01 CE to one step's KL, so 0.01 T CE to the bound."""
    logits = torch.randn(1, 3, VOCAB, dtype=torch.float64)
    clean, noisy, times = torch.tensor([[5, 6, 7]]), torch.tensor([[MASK, 6, MASK]]), torch.tensor([0.5])
    scheduler = scheduler_of()
    args = (scheduler, logits, clean, noisy, times, 4)
    plain = discrete_time_bound(*args, reduction="sum")
    hybrid = discrete_time_bound(*args, reduction="sum", cross_entropy_weight=0.01)
    log_p = logits.masked_fill(torch.arange(VOCAB) == MASK, -torch.inf).log_softmax(-1)
    cross_entropy = -(log_p[0, 0, 5] + log_p[0, 2, 7])
    torch.testing.assert_close(hybrid - plain, 0.01 * 4 * cross_entropy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "avg"}, "`reduction` must be one of"),
        ({"timesteps": torch.ones(3)}, "`timesteps` must be a float tensor"),
        ({"timesteps": torch.tensor([700, 3])}, "`timesteps` must be a float tensor"),
        ({"timesteps": torch.tensor([0.5, 0.0])}, r"`timesteps` must lie in \(0, 1\]"),
        ({"noisy_sample": torch.zeros(2, 4, dtype=torch.long)}, "`noisy_sample`"),
        ({"logits": torch.zeros(2, 4, VOCAB)}, "`logits` must have shape"),
        ({"positions": torch.tensor([0])}, "`logits` must have shape"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    clean = torch.full((2, 3), 5)
    arguments = {
        "logits": torch.zeros(2, 3, VOCAB),
        "sample": clean,
        "noisy_sample": clean.masked_fill(torch.ones(2, 3, dtype=torch.bool), MASK),
        "timesteps": torch.ones(2),
    }
    with pytest.raises(ValueError, match=message):
        continuous_time_bound(scheduler_of(), **{**arguments, **change})
    with pytest.raises(ValueError, match="`num_steps`"):
        discrete_time_bound(scheduler_of(), **arguments, num_steps=0)
    with pytest.raises(ValueError, match="grid i / 4"):
        discrete_time_bound(scheduler_of(), **{**arguments, "timesteps": torch.tensor([0.3, 1.0])}, num_steps=4)


# --- The passes over [n, vocab] ---


@pytest.mark.parametrize("weights", [None, "shared", "per row"])
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_prediction_and_its_gradient_equal_autograd_s(weights, chunk, monkeypatch):
    monkeypatch.setattr(losses, "rows_at_a_time", lambda device, vocab_size: chunk)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 9, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(5, 9, (7,), generator=generator)
    rows = {None: 0, "shared": 1, "per row": 7}[weights]
    weights = torch.randn(rows, 9, generator=generator, dtype=torch.float64) if rows else None

    def by_autograd(logits):
        log_pi = logits.masked_fill(torch.arange(9) == MASK, -torch.inf).log_softmax(-1)
        expected = None if weights is None else (log_pi.exp() * weights).sum(-1)
        return log_pi.gather(-1, targets[:, None]).squeeze(-1), expected

    gradients = []
    for outputs in (SubsPrediction.apply(logits, targets, MASK, weights)[:2], by_autograd(logits)):
        loss = (outputs[0] ** 2).sum() + (0 if outputs[1] is None else (outputs[1] ** 3).sum())
        gradients.append((loss, *torch.autograd.grad(loss, logits)))
    torch.testing.assert_close(gradients[0], gradients[1])


# --- The estimator by the number of masked tokens ---


@pytest.mark.parametrize("maskable_tokens", [1, 2, 3])
def test_the_count_estimator_has_the_expectation_and_gradient_of_the_bound_in_time(maskable_tokens):
    """E over k uniform and all choices of k positions, against the integral over t of 1/t and binomial masks."""
    generator = torch.Generator().manual_seed(4)
    clean = torch.randint(5, VOCAB, (1, 4), generator=generator)
    table = torch.randn(2**4, 4, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)
    maskable = torch.arange(4)[None] < maskable_tokens
    times, weights = np.polynomial.legendre.leggauss(12)  # exact: the integrand is a polynomial
    times, weights = (times + 1) / 2, weights / 2

    by_count, by_time = 0.0, 0.0
    for pattern in itertools.product([False, True], repeat=maskable_tokens):
        count = sum(pattern)
        if count == 0:
            continue
        masked = torch.tensor([[*pattern, *[False] * (4 - maskable_tokens)]])
        noisy = clean.masked_fill(masked, MASK)
        logits = table[sum(2**i for i, hit in enumerate(pattern) if hit)][None]
        nats = masked_count_bound(scheduler_of(), logits, clean, noisy, maskable=maskable, reduction="sum")
        by_count = by_count + nats / maskable_tokens / math.comb(maskable_tokens, count)
        for t, weight in zip(times, weights):
            timesteps = torch.tensor([t])
            nats = continuous_time_bound(scheduler_of(), logits, clean, noisy, timesteps, reduction="sum")
            by_time = by_time + weight * t**count * (1 - t) ** (maskable_tokens - count) * nats
    assert by_count.item() == pytest.approx(by_time.item(), abs=1e-12)
    (count_gradient,) = torch.autograd.grad(by_count, table)
    (time_gradient,) = torch.autograd.grad(by_time, table)
    torch.testing.assert_close(count_gradient, time_gradient, rtol=0, atol=1e-12)


def test_the_count_estimator_reduces_and_refuses_as_the_others_do():
    clean, logits = torch.tensor([[5, 6, 7, 5], [6, 6, 5, 7]]), torch.zeros(2, 4, VOCAB)
    noisy, maskable = clean.clone(), torch.ones(2, 4, dtype=torch.bool)
    noisy[0, 1] = noisy[1, 2] = noisy[1, 3] = MASK
    maskable[1, 0] = False
    rows = masked_count_bound(scheduler_of(), logits, clean, noisy, maskable=maskable, reduction="none")
    torch.testing.assert_close(rows, math.log(VOCAB - 1) * torch.tensor([4.0, 3.0]))
    mean = masked_count_bound(scheduler_of(), logits, clean, noisy, maskable=maskable)
    assert mean.item() == pytest.approx(math.log(VOCAB - 1))
    assert masked_count_bound(scheduler_of(), logits, clean, clean).item() == 0
    with pytest.raises(ValueError, match="'spindle' depends on the token"):
        masked_count_bound(scheduler_of(**SPINDLE), logits, clean, noisy)
    with pytest.raises(ValueError, match="`reduction` must be one of"):
        masked_count_bound(scheduler_of(), logits, clean, noisy, reduction="average")


def test_terms_tell_what_the_network_predicts():
    generator = torch.Generator().manual_seed(5)
    logits, clean = torch.randn(3, 4, VOCAB, generator=generator), torch.randint(5, VOCAB, (3, 4), generator=generator)
    noisy = torch.full_like(clean, MASK)
    logits[0, 0, MASK] = 100  # ruled out
    allowed = logits.clone()
    allowed[..., MASK] = -torch.inf
    for scheduler in (scheduler_of(), scheduler_of(**SPINDLE)):
        terms = continuous_time_terms(scheduler, logits, clean, noisy, torch.full((3,), 0.5))
        expected = allowed.log_softmax(-1).gather(-1, clean[..., None]).flatten()
        torch.testing.assert_close(terms.log_pi, expected)
        assert terms.correct.tolist() == (allowed.argmax(-1) == clean).flatten().tolist()
        assert terms.rows.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kwargs", [{}, SPINDLE])
def test_a_gradient_in_the_place_of_the_logits_is_the_same_and_taken_once(kwargs, dtype):
    generator = torch.Generator().manual_seed(6)
    scheduler, clean = scheduler_of(**kwargs), torch.randint(5, VOCAB, (3, 4), generator=generator)
    noisy, times = torch.full_like(clean, MASK), torch.full((3,), 0.5)
    values = torch.randn(12, VOCAB, generator=generator).to(dtype)
    positions, gradients = torch.arange(12), []
    for overwrite in (False, True):
        leaf = values.clone().requires_grad_()
        logits = leaf * 1  # as a head's output: no leaf
        terms = continuous_time_terms(scheduler, logits, clean, noisy, times, positions, overwrite_logits=overwrite)
        loss = terms.nats.sum()
        loss.backward(retain_graph=True)
        gradients.append(leaf.grad.clone())
        assert torch.equal(logits, values) != overwrite
        if overwrite:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    assert torch.equal(*gradients)
