"""The pipeline's samples follow the law that enumeration gives, for every schedule, finite and continuous time."""

import numpy as np
import pytest
import torch
from toys import CLS, COUNTS, EMITTED, LENGTH, MASK, SEP, assert_follows, canvases, exact_law, toy_model, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline

SAMPLES = 20_000
CONTINUOUS = 300  # steps that stand for infinity, predictions at their middle


def law_of(model, steps, *args, **kwargs):
    return exact_law(model, steps or CONTINUOUS, *args, midpoint=steps is None, **kwargs)


def sample_frequencies(model, scheduler_kwargs, seed=0, start=None, samples=SAMPLES, **call):
    """How often each state comes out of the pipeline, in the order of `canvases()`."""
    pipe = TextDiffusionPipeline(model, toy_tokenizer(), AbsorbingStateScheduler(**scheduler_kwargs))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    if start is None:
        call["gen_length"] = LENGTH
    else:
        call["input_ids"] = torch.tensor([[CLS, *start, SEP]])
    out = pipe(num_texts_per_prompt=samples, generator=generator, output_type="seq", **call)
    found = torch.stack(out.sequences)[:, 1:-1].numpy()
    assert not (found == MASK).any()
    return found


def assert_canvases_follow(found, law, emitted=EMITTED):
    assert_follows(found, law, canvases(emitted=emitted))


SPINDLE = {"schedule": "spindle", "token_counts": COUNTS}


@pytest.mark.parametrize("steps", [1, 3, None])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial", "geometric"])
def test_token_independent_schedules_follow_their_law(schedule, steps):
    model = toy_model()
    law = law_of(model, steps, schedule)
    assert_canvases_follow(sample_frequencies(model, {"schedule": schedule}, num_inference_steps=steps), law)


@pytest.mark.parametrize("steps", [1, 2, 5, None])
@pytest.mark.parametrize("tilt", [True, False])
@pytest.mark.parametrize(("kind", "spindle_lambda"), [("surprisal", 0.3), ("log_count", 1.0)])
def test_spindle_follows_its_law(kind, spindle_lambda, tilt, steps):
    model = toy_model()
    law = law_of(model, steps, "spindle", tilt=tilt, kind=kind, spindle_lambda=spindle_lambda)
    kwargs = {**SPINDLE, "tilt": tilt, "spindle_information": kind, "spindle_lambda": spindle_lambda}
    assert_canvases_follow(sample_frequencies(model, kwargs, num_inference_steps=steps), law)


def test_the_toy_is_no_trivial_one():
    """Its texts are diverse and their two tokens depend on each other, so that order and time matter to the laws."""
    law = exact_law(toy_model(), 3, "linear")[(canvases() != MASK).all(1)].reshape(4, 4)
    independent = law.sum(1, keepdims=True) * law.sum(0, keepdims=True)
    assert -(law * np.log(law)).sum() > 1.5
    assert (law * np.log(law / independent)).sum() > 0.05


def test_spindle_law_differs_from_linear_law():
    """Without this, the proofs above could pass with a spindle that does nothing."""
    model = toy_model()
    found = sample_frequencies(model, SPINDLE, num_inference_steps=2)
    with pytest.raises(AssertionError):
        assert_canvases_follow(found, exact_law(model, 2, "linear"))


@pytest.mark.parametrize("conditioning", ["layerwise", "prefix"])
@pytest.mark.parametrize(("schedule", "steps"), [("linear", 4), ("linear", None), ("spindle", 4), ("spindle", None)])
def test_time_conditioned_models_follow_their_law(conditioning, schedule, steps):
    model = toy_model(time_conditioning=conditioning)
    law = law_of(model, steps, schedule, conditioned=True)
    kwargs = SPINDLE if schedule == "spindle" else {"schedule": schedule}
    assert_canvases_follow(sample_frequencies(model, kwargs, num_inference_steps=steps), law)


@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("kwargs", [{"schedule": "linear"}, SPINDLE])
def test_infill_follows_its_law(kwargs, steps):
    """A gap next to a given token: the given token stays, and the terminator is not sampled."""
    model = toy_model()
    emitted = EMITTED[1:]
    law = law_of(model, steps, kwargs["schedule"], start=[6, MASK], emitted=emitted)
    found = sample_frequencies(model, kwargs, start=[6, MASK], num_inference_steps=steps)
    assert (found[:, 0] == 6).all()
    assert_canvases_follow(found, law, emitted=emitted)


def temperature(p):
    p = np.where(p > 0, p, 0) ** (1 / 0.5)
    return p / p.sum(-1, keepdims=True)


def top_k(p):
    p = np.where(p >= np.sort(p, axis=-1)[..., -2:-1], p, 0)
    return p / p.sum(-1, keepdims=True)


def top_p(p):
    order = np.argsort(-p, axis=-1)
    ranked = np.take_along_axis(p, order, -1)
    ranked = np.where(np.cumsum(ranked, -1) - ranked < 0.8, ranked, 0)
    shaped = np.zeros_like(p)
    np.put_along_axis(shaped, order, ranked, -1)
    return shaped / shaped.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [{"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.8}])
@pytest.mark.parametrize("kwargs", [{"schedule": "linear"}, SPINDLE])
def test_shaping_applies_to_the_prediction_before_the_posterior(kwargs, shape):
    model = toy_model()
    by_hand = {"temperature": temperature, "top_k": top_k, "top_p": top_p}[next(iter(shape))]
    law = exact_law(model, 3, kwargs["schedule"], shape=by_hand)
    assert_canvases_follow(sample_frequencies(model, kwargs, num_inference_steps=3, **shape), law)


@pytest.mark.parametrize("kwargs", [{"schedule": "cosine"}, SPINDLE])
def test_own_loop_with_full_logits_follows_the_same_law(kwargs):
    model = toy_model()
    scheduler = AbsorbingStateScheduler(mask_token_id=MASK, suppressed_token_ids=[0, 1, 2], vocab_size=8, **kwargs)
    generator = torch.Generator().manual_seed(0)
    sample = torch.tensor([[CLS, *[MASK] * LENGTH, SEP]]).repeat(SAMPLES, 1)
    scheduler.set_timesteps(4)
    for t in scheduler.timesteps:
        with torch.no_grad():
            logits = model(sample).logits
        sample = scheduler.step(logits, t, sample, generator=generator).prev_sample
    assert_canvases_follow(sample[:, 1:-1].numpy(), exact_law(model, 4, kwargs["schedule"]))


def test_token_entropy_of_many_draws_equals_the_exact_entropy():
    """Float32 Gumbel noise fails this: it cuts the tails off."""
    from diffusers_text.schedulers.sampling import draw_tokens, draw_uniforms

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator) * 4
    p = logits.double().softmax(0)
    draws = 1_000_000
    tokens = draw_tokens(logits.expand(draws, -1), draw_uniforms([draws], generator, "cpu"))
    surprisal = -p.log()
    entropy, deviation = (p * surprisal).sum(), (p * surprisal**2).sum() - (p * surprisal).sum() ** 2
    assert abs(surprisal[tokens].mean() - entropy) < 4 * (deviation / draws) ** 0.5
    frequencies = torch.bincount(tokens, minlength=50).double() / draws
    plug_in = -(frequencies[frequencies > 0] * frequencies[frequencies > 0].log()).sum()
    assert abs(plug_in - entropy) < 2e-3


def test_draws_never_pick_a_token_without_probability():
    from diffusers_text.schedulers.sampling import draw_tokens

    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]] * 3)
    largest = 1 - 2.0**-53
    assert draw_tokens(logits, torch.tensor([0.0, 0.5, largest], dtype=torch.float64)).tolist() == [1, 3, 3]


def sentence_mean_law(model, steps):
    """
    Spindle with the paper's sentence mean: masked tokens count with the corpus mean, so the rates depend on the state.
    """
    import math

    from toys import model_probabilities, transition

    total, lam = sum(COUNTS), 0.3
    information = np.array([-math.log(max(n, 1) / total) for n in COUNTS])
    corpus_mean = sum(n / total * i for n, i in zip(COUNTS, information))
    states = canvases()
    filled = np.concatenate([states, np.full((len(states), 1), SEP)], axis=1)  # the closing [SEP] is part of the row
    mean = np.where(filled == MASK, corpus_mean, information[filled]).mean(1)
    limit = 0.95 / (math.pi * lam)
    h = np.clip(1 - mean[:, None] / information, -limit, limit)  # [states, vocab]
    pi = model_probabilities(model, states)
    law = (states == MASK).all(1).astype(float)
    for i in range(steps, 0, -1):
        g = [time + lam * math.sin(math.pi * time) * h for time in (i / steps, (i - 1) / steps)]
        p = pi * g[0][:, None, :]
        p = p / p.sum(-1, keepdims=True)
        u = 1 - g[1] / g[0]
        law = law @ transition(states, p, u)
    return law


@pytest.mark.parametrize("steps", [4, None])
def test_sentence_mean_follows_its_law(steps):
    model = toy_model()
    law = sentence_mean_law(model, steps or 300)
    found = sample_frequencies(model, {**SPINDLE, "spindle_mean": "sentence"}, num_inference_steps=steps)
    assert_canvases_follow(found, law)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 7, None])
@pytest.mark.parametrize(
    ("kwargs", "law_kwargs"),
    [
        ({"schedule": "linear"}, {}),
        ({"schedule": "cosine"}, {}),
        (SPINDLE, {}),
        ({**SPINDLE, "tilt": False}, {"tilt": False}),
        ({**SPINDLE, "spindle_lambda": 1.0}, {"spindle_lambda": 1.0}),
    ],
)
def test_laws_hold_for_another_model_at_two_hundred_thousand_samples(kwargs, law_kwargs, steps):
    model = toy_model(2)
    law = exact_law(model, steps or 3000, kwargs["schedule"], midpoint=steps is None, **law_kwargs)
    assert_canvases_follow(sample_frequencies(model, kwargs, samples=200_000, num_inference_steps=steps), law)
