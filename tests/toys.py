"""A vocabulary small enough to enumerate, and what the laws of the reverse process say about it."""

import itertools
import math
from collections import Counter

import numpy as np
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from diffusers_text import DiffusionBertConfig, DiffusionBertForMaskedDiffusion

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = ["a", "b", "c"]
COUNTS = [0, 0, 0, 7, 0, 1, 20, 400]  # of the whole vocabulary: [SEP], a, b and c occur
EMITTED = [SEP, 5, 6, 7]  # what unconditional text can hold
LENGTH = 2


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def toy_tokenizer(words=WORDS, mask_token="[MASK]") -> PreTrainedTokenizerFast:
    """A word-level tokenizer in the manner of BERT: [CLS] text [SEP]."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(SPECIALS + words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token=mask_token,
        model_max_length=32,
    )


def toy_config(**kwargs) -> DiffusionBertConfig:
    settings = {
        "vocab_size": len(SPECIALS) + len(WORDS),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    }
    return DiffusionBertConfig(**{**settings, **kwargs})


def toy_model(seed=1, spread=0.6, **kwargs) -> DiffusionBertForMaskedDiffusion:
    """A random BERT whose predictions depend strongly on the context (and on the time where it is told)."""
    model = DiffusionBertForMaskedDiffusion(toy_config(**kwargs)).eval()
    torch.manual_seed(seed)
    BertForMaskedLM(toy_config(**kwargs))  # draws as a plain BERT does first: a toy does not depend on our own set-up
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, spread)
        for name, parameter in model.named_parameters():
            if "time_mlp" in name and name.endswith("linear_1.weight"):
                # Without the sinusoids of over 10 radians, which would need thousands of steps to follow.
                parameter[:, [0, 1, 2, 3, 8, 9, 10, 11]] = 0
    return model


def spindle_h(kind="surprisal", spindle_lambda=0.3, counts=COUNTS):
    """h of each id, written from the papers' formulas with plain floats."""
    total = sum(counts)
    if kind == "surprisal":
        information = [-math.log(max(n, 1) / total) for n in counts]
    else:
        largest = max(math.log(1 + max(n, 1)) for n in counts)
        information = [math.log(1 + max(n, 1)) / largest for n in counts]
    mean = sum(n / total * i for n, i in zip(counts, information))
    h = [1 - mean / i if kind == "surprisal" else mean - i for i in information]
    limit = 0.95 / (math.pi * spindle_lambda)
    return np.array([min(max(x, -limit), limit) for x in h])


def g_of(schedule, t, **kwargs):
    """g of every id at time t, written from the papers' formulas with plain floats."""
    ones = np.ones(len(COUNTS))
    if schedule == "linear":
        return t * ones
    if schedule == "cosine":
        return math.cos(math.pi / 2 * (1 - t)) * ones
    if schedule == "polynomial":
        return t**2 * ones
    if schedule == "geometric":
        alpha = [math.exp(-(1e-5 ** (1 - time)) * 20.0**time) for time in (0, t, 1)]
        return (1 - (alpha[1] - alpha[2]) / (alpha[0] - alpha[2])) * ones
    return t + kwargs.get("spindle_lambda", 0.3) * math.sin(math.pi * t) * spindle_h(**kwargs)


def canvases(length=LENGTH, emitted=EMITTED):
    """All states of the reverse process, `[states, length]`: each position masked or an emitted token."""
    return np.array(list(itertools.product([MASK, *emitted], repeat=length)))


def model_probabilities(model, states, g=None, t=None, tilt=True, emitted=EMITTED, shape=None):
    """p [states, length, vocab] of a model on `[CLS] state [SEP]`: softmax over emitted ids, tilted by g."""
    ids = torch.tensor(np.column_stack([np.full(len(states), CLS), states, np.full(len(states), SEP)]))
    times = {} if t is None else {"timesteps": torch.full((len(states),), t, dtype=torch.float32)}
    with torch.no_grad():
        logits = model(ids, **times).logits[:, 1:-1].double().numpy()
    weights = np.zeros_like(logits)
    weights[..., emitted] = np.exp(logits[..., emitted] - logits[..., emitted].max(-1, keepdims=True))
    if g is not None and tilt:
        weights = weights * g
    p = weights / weights.sum(-1, keepdims=True)
    return p if shape is None else shape(p)


def transition(states, p, u):
    """The matrix of one reverse step: masked positions take token k with probability p_k u_k, independently."""
    matrix = np.ones((len(states), len(states)))
    for position in range(states.shape[1]):
        old, new = states[:, position, None], states[None, :, position]
        reveal = p[:, position] * u  # [states, vocab]
        revealed = np.where(new == MASK, 1 - reveal.sum(-1, keepdims=True), reveal[:, states[:, position]])
        matrix *= np.where(old == MASK, revealed, old == new)
    return matrix


def exact_law(
    model,
    steps,
    schedule,
    *,
    start=None,
    tilt=True,
    conditioned=False,
    midpoint=False,
    emitted=EMITTED,
    shape=None,
    **kwargs,
):
    """
    The probability of every state after `steps` reverse steps from `start` (fully masked), `[states]`. With `midpoint`
    the
    prediction is that at the middle of a step: the law of continuous time, to second order.
    """
    states = canvases(emitted=emitted)
    start = [MASK] * LENGTH if start is None else start
    law = (states == start).all(1).astype(float)
    p_untilted = None if conditioned else model_probabilities(model, states, emitted=emitted)
    for i in range(steps, 0, -1):
        t, s = i / steps, (i - 1) / steps
        g = g_of(schedule, t, **kwargs)
        seen = (t + s) / 2 if midpoint else t
        seen_g = g_of(schedule, seen, **kwargs)
        if conditioned:
            p = model_probabilities(model, states, seen_g, seen, tilt, emitted, shape)
        else:
            p = p_untilted * seen_g if tilt else p_untilted
            p = p / p.sum(-1, keepdims=True)
            p = p if shape is None else shape(p)
        law = law @ transition(states, p, 1 - g_of(schedule, s, **kwargs) / g)
    return law


def assert_follows(found, law, states=None):
    """
    A chi-square test. `found` are rows of ids; `law` maps tuples of ids to probabilities, or is an array [n] over
    `states` [n, length].
    """
    if states is not None:
        law = dict(zip(map(tuple, states.tolist()), law.tolist(), strict=True))
    counts = Counter(tuple(map(int, row)) for row in found)
    possible = {text: mass for text, mass in law.items() if mass > 1e-12}
    assert abs(sum(possible.values()) - 1) < 1e-6
    assert set(counts) <= set(possible)
    common = [text for text, mass in possible.items() if mass * len(found) >= 5]
    observed = [counts[text] for text in common]
    expected = [possible[text] * len(found) for text in common]
    if len(found) - sum(expected) > 1e-6:  # chi-square needs a handful in every class
        observed, expected = [*observed, len(found) - sum(observed)], [*expected, len(found) - sum(expected)]
    expected = np.array(expected) * sum(observed) / sum(expected)
    p_value = chisquare(observed, expected).pvalue
    assert p_value > 1e-4, f"p = {p_value:.2g}"
