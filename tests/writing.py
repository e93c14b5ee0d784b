"""Toy pipelines of every scheduler, and the laws of the texts they write."""

import functools
from collections import Counter

import numpy as np
import torch
from toys import (
    CLS,
    COUNTS,
    EMITTED,
    MASK,
    PAD,
    SEP,
    canvases,
    g_of,
    model_probabilities,
    seeded,
    toy_model,
    toy_tokenizer,
    transition,
)
from transformers import AutoModelForMaskedLM, BertConfig, RobertaConfig

from diffusers_text import AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler, TextDiffusionPipeline

SAMPLES = 20_000
WORDS = EMITTED[1:]  # what a gap can hold
INF = float("inf")
SPINDLE = {"schedule": "spindle", "token_counts": COUNTS}
SCHEDULERS = {
    "linear": (AbsorbingStateScheduler, {}),
    "spindle": (AbsorbingStateScheduler, SPINDLE),
    "confidence": (ConfidenceUnmaskingScheduler, {}),
    "remdm": (ReMDMScheduler, {"strategy": "rescale", "eta": 0.5}),
}
STEPS = {"linear": None, "spindle": None, "confidence": None, "remdm": 6}
FAMILIES = ["none", "layerwise", "prefix", "bert", "roberta"]
PAIRS = [(kind, "none") for kind in SCHEDULERS] + [
    *((kind, family) for family in FAMILIES[1:] for kind in ("linear", "spindle")),
    ("confidence", "bert"),
    ("remdm", "layerwise"),
]


def family_model(name, seed=1, limit=32):
    """A model whose longest sequence is `limit`, one less with the prefix, and whose predictions vary."""
    if name in ("none", "layerwise", "prefix"):
        return toy_model(seed, time_conditioning=name, max_position_embeddings=limit)
    shape = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "bert": BertConfig(**shape, intermediate_size=32, max_position_embeddings=limit),
        "roberta": RobertaConfig(**shape, intermediate_size=32, max_position_embeddings=limit + 1, pad_token_id=PAD),
    }
    torch.manual_seed(seed)
    model = AutoModelForMaskedLM.from_config(configs[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.6)
    return model


def favouring(token):
    """A model that finds one token the most probable everywhere."""
    model = toy_model()
    model.get_output_embeddings().bias.data[token] += 50
    return model


def build(kind="linear", model=None, tokenizer=None, **scheduler_kwargs):
    """A pipeline of one of the `SCHEDULERS` whose calls take that one's `STEPS` unless they say otherwise."""
    scheduler_class, settings = SCHEDULERS[kind]
    scheduler = scheduler_class(**{**settings, **scheduler_kwargs})
    pipe = Writer(model or toy_model(), tokenizer or toy_tokenizer(), scheduler)
    pipe.steps = STEPS[kind]
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Writer(TextDiffusionPipeline):
    @functools.wraps(TextDiffusionPipeline.__call__)
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **{"num_inference_steps": self.steps, **kwargs})

    def stream(self, *args, **kwargs):
        return super().stream(*args, **{"num_inference_steps": self.steps, **kwargs})


def one_each(count, seed=0):
    return [seeded(seed + i) for i in range(count)]


def lists(output):
    return [sequence.tolist() for sequence in output.sequences]


def passes_of(module):
    """The ids `[rows, seq]` of each coming call of a model, as lists."""
    seen = []
    module.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["input_ids"].tolist()), with_kwargs=True)
    return seen


def generated_columns(prompt_ids, gen_length):
    """Where `gen_length` new tokens stand: before the closing separator."""
    start = len(prompt_ids) - (prompt_ids[-1] == SEP)
    return range(start, start + gen_length)


def start_canvas(prompt_ids, gen_length):
    columns = generated_columns(prompt_ids, gen_length)
    return [*prompt_ids[: columns.start], *[MASK] * gen_length, *prompt_ids[columns.start :]]


def cut(sequence, generated):
    """A whole canvas up to its first new terminator."""
    ends = [i for i in generated if sequence[i] == SEP]
    return sequence[: ends[0] + 1] if ends else sequence


def replayed(canvas, trajectory, before=None):
    """A canvas after the changes of a trajectory, or after those of the forward passes `before` one."""
    canvas = list(canvas)
    for step, position, token, _ in zip(*(entry.tolist() for entry in trajectory)):
        if before is None or step < before:
            canvas[position] = token
    return canvas


def prediction(model, canvas, column, emitted=EMITTED, t=None, change=None):
    """p [vocab] of a model at one column of a row: softmax over `emitted`, of logits that `change` may change."""
    logits = raw_logits(model, canvas, t)[column]
    if change is not None:
        logits = change(logits)
    p = np.zeros(len(logits))
    p[emitted] = np.exp(logits[emitted] - logits[emitted].max())
    return p / p.sum()


def raw_logits(model, canvas, t=None):
    """[seq, vocab]"""
    times = {} if t is None else {"timesteps": torch.tensor([t])}
    with torch.no_grad():
        return model(input_ids=torch.tensor([canvas]), **times).logits[0].double().numpy()


def left_to_right_law(model, length, see=lambda canvas, column: (canvas, column), **kwargs):
    """Of texts written one token at a time from the left until the terminator; `see` is the model's view of a row."""
    law = {(): 1.0}
    for column in range(1, length + 1):
        grown = Counter()
        for text, mass in law.items():
            if SEP in text:
                grown[text] = mass
                continue
            canvas = [CLS, *text, *[MASK] * (length - len(text)), SEP]
            p = prediction(model, *see(canvas, column), **kwargs)
            for token in p.nonzero()[0].tolist():
                grown[(*text, token)] += mass * p[token]
        law = grown
    return {text if SEP in text else (*text, SEP): mass for text, mass in law.items()}


def any_order_law(predict, canvas):
    """Of rows filled one token at a time in random order; `predict(canvas, column)` gives p [vocab]."""
    masked = [column for column, token in enumerate(canvas) if token == MASK]
    if not masked:
        return {tuple(canvas): 1.0}
    law = Counter()
    for column in masked:
        p = predict(canvas, column)
        for token in p.nonzero()[0].tolist():
            filled = [*canvas[:column], token, *canvas[column + 1 :]]
            for text, mass in any_order_law(predict, filled).items():
                law[text] += mass * p[token] / len(masked)
    return law


def block_law(model, steps, schedule, block_length, length, midpoint=False):
    """Of texts of `length` tokens whose blocks are reverse processes of their own, until a block with a terminator."""
    states = canvases(length)
    untilted = model_probabilities(model, states)
    law = (states == MASK).all(1).astype(float)
    for start in range(0, length, block_length):
        written = np.zeros((len(states), length, 1))
        written[:, start : start + block_length] = 1
        written[(states[:, :start] == SEP).any(1)] = 0
        for i in range(steps, 0, -1):
            t, s = i / steps, (i - 1) / steps
            p = untilted * g_of(schedule, (t + s) / 2 if midpoint else t)
            p = p / p.sum(-1, keepdims=True)
            law = law @ transition(states, p * written, 1 - g_of(schedule, s) / g_of(schedule, t))
    texts = Counter()
    for state, mass in zip(states.tolist(), law.tolist()):
        if mass > 0:
            texts[tuple(cut([*state, SEP], range(length)))] += mass
    return texts
