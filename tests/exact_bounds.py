"""Bounds of a toy corpus by going through all noise."""

import itertools

import numpy as np
import torch
from toys import CLS, MASK, SEP, g_of

from diffusers_text import continuous_time_bound, discrete_time_bound

# Rows of unequal length and frequency: 2 or 3 tokens that can be masked.
SHORT = [[CLS, 5, 6], [CLS, 7, SEP], [CLS, 7, 7, SEP], [CLS, 6, 7, 7], [CLS, 7, 5, 7], [CLS, 5, SEP]]
SHORT_COUNTS = [sum(row.count(token) for row in SHORT) if token > CLS else 0 for token in range(8)]


def exact_bound(model, scheduler, steps=None):
    """The bound in nats per token of SHORT: the sum over all masks, and over times on the grid or by quadrature."""
    clean = torch.zeros(len(SHORT) * 8, 4, dtype=torch.long)
    masked = torch.zeros_like(clean, dtype=torch.bool)
    for i, (row, pattern) in enumerate(itertools.product(SHORT, itertools.product([0, 1], repeat=3))):
        clean[i, : len(row)] = torch.tensor(row)
        masked[i, 1:] = torch.tensor(pattern)
    kept = ~(masked & (clean == 0)).any(dim=1)  # no masks on padding
    clean, masked = clean[kept], masked[kept]
    noisy, inside = clean.masked_fill(masked, MASK), clean != 0
    if steps is None:
        nodes, weights = np.polynomial.legendre.leggauss(40)
        times = [((node + 1) / 2, weight / 2) for node, weight in zip(nodes, weights)]
    else:
        times = [(i / steps, 1 / steps) for i in range(1, steps + 1)]
    spindle = {"counts": SHORT_COUNTS} if scheduler.config.schedule == "spindle" else {}
    total = 0.0
    for t, weight in times:
        g = g_of(scheduler.config.schedule, t, **spindle)[clean.numpy()]
        law = np.where(clean.numpy() > CLS, np.where(masked.numpy(), g, 1 - g), 1).prod(axis=1)
        timesteps = torch.full((len(clean),), t, dtype=torch.double)
        told = {} if model.config.time_conditioning == "none" else {"timesteps": timesteps}
        with torch.no_grad():
            logits = model(noisy, attention_mask=inside.long(), **told).logits
        if steps is None:
            nats = continuous_time_bound(scheduler, logits, clean, noisy, timesteps, reduction="none")
        else:
            nats = discrete_time_bound(scheduler, logits, clean, noisy, timesteps, steps, reduction="none")
        total += weight * float(law @ nats.double().numpy())
    return total / sum(len(row) - 1 for row in SHORT)
