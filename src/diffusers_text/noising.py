"""
Noisy rows with the estimate of the bound that belongs to them, for training and evaluation. Noise is a row's own,
whatever batch, process or order it comes in.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from .losses import BoundTerms, continuous_time_terms, discrete_time_terms, masked_count_terms
from .schedulers.sampling import precise_dtype

# What a keyed stream is for: keys that are alike but for this have nothing to do with each other.
TIMES, MASKS, ORDER = 1, 2, 3


class NoisyRows(NamedTuple):
    """Rows, what noise made of them, and how it was drawn."""

    sample: torch.LongTensor  # [batch, seq], clean
    noisy: torch.LongTensor  # [batch, seq]
    levels: torch.Tensor  # [batch], in (0, 1]: times, or masked shares where counts are drawn, before any rounding
    level_weights: torch.Tensor  # [batch], with which they count as uniform ones
    timesteps: torch.Tensor  # [batch]
    weights: torch.Tensor  # [batch], with which a row counts in the estimate
    positions: torch.LongTensor  # [n], flat indices of what is masked
    maskable: torch.BoolTensor  # [batch, seq]
    by_count: bool
    num_steps: int | None


def keyed_generator(*key: int) -> torch.Generator:
    """
    A generator on the CPU whose seed mixes the integers of `key`, so that near keys have unrelated streams. torch
    takes 32 bits of a seed: two of a million keys do share a stream, which harms nothing here.
    """
    return torch.Generator().manual_seed(_hashed(repr(key).encode()))


def row_key(ids: list[int]) -> int:
    """A number of 64 bits for the tokens of a row."""
    return _hashed(np.array(ids, dtype=np.int64).tobytes())


def _hashed(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def draw_noise(
    scheduler,
    sample: torch.LongTensor,
    maskable: torch.BoolTensor,
    uniforms: torch.Tensor,
    generators: list[torch.Generator] | None,
    by_count: bool = False,
    *,
    power: float = 1.0,
    num_steps: int | None = None,
    time_epsilon: float = 0.0,
    nonempty: bool = False,
    antithetic: bool = False,
) -> NoisyRows:
    r"""
    A noisy version of each row.

    With `v = u^power` of the uniform numbers u, its time is v, or the number of its masked tokens is `ceil(v L)` of L.
    A power above 1 draws small ones more often; `weights` are the ratio of the uniform law to the one drawn from.

    Args:
        scheduler ([`AbsorbingStateScheduler`]): the noise.
        sample (`torch.LongTensor` of shape `[batch, seq]`), maskable (`torch.BoolTensor` of the same shape).
        uniforms (`torch.Tensor` of shape `[batch]`): numbers in (0, 1], each uniform.
        generators (list of `torch.Generator`, *optional*): one a row, for which of its tokens are masked.
        by_count (`bool`, defaults to `False`): whether the number of masked tokens is drawn, or each token by itself.
        power (`float`, defaults to 1): at least 1.
        num_steps (`int`, *optional*): times are rounded up to the grid `i / num_steps`.
        time_epsilon (`float`, defaults to 0): times are cut to [time_epsilon, 1].
        nonempty (`bool`, defaults to `False`):
            Given that something is masked, the probability of which goes into `weights`.
        antithetic (`bool`, defaults to `False`): `1 - u` in place of all uniform numbers, those of tokens as well.
    """
    u = uniforms.to(sample.device, precise_dtype(sample.device))
    if antithetic:
        u = (1 - u).clamp_min(2**-25)  # half of what lies between two numbers of float32
    levels = u**power
    lengths = maskable.sum(dim=1)
    if by_count or num_steps is not None:
        cells = lengths.clamp_min(1) if by_count else torch.full_like(lengths, num_steps)
        index = (levels * cells).ceil().clamp_min(1).minimum(cells)
        share = (index / cells) ** (1 / power) - ((index - 1) / cells) ** (1 / power)
        level_weights, timesteps = 1 / (share * cells), index / cells
    else:
        level_weights = power * u ** (power - 1)
        timesteps = time_epsilon + (1 - time_epsilon) * levels
    shared = {"maskable": maskable, "generator": generators, "antithetic": antithetic}
    timesteps, weights = timesteps.float(), level_weights
    if by_count:
        counts = index.long().minimum(lengths)
        noisy, timesteps = scheduler.add_noise_by_count(sample, counts, **shared)
    elif nonempty:
        noisy, probability = scheduler.add_nonempty_noise(sample, timesteps, **shared)
        weights = weights * probability
    else:
        noisy = scheduler.add_noise(sample, timesteps, **shared)
    positions = (maskable & (noisy == scheduler.mask_token_id)).flatten().nonzero().flatten()
    return NoisyRows(
        sample, noisy, levels, level_weights, timesteps, weights, positions, maskable, by_count, num_steps
    )


def bound_terms(
    scheduler, logits: torch.Tensor, positions: torch.LongTensor, noise: NoisyRows, overwrite_logits: bool = False
) -> BoundTerms:
    r"""
    What masked positions contribute to the estimate of the bound that `noise` was drawn for, its weights included.

    Args:
        scheduler ([`AbsorbingStateScheduler`]): what drew the noise.
        logits (`torch.Tensor` of shape `[n, vocab]`), positions (`torch.LongTensor` of shape `[n]`): some of
            `noise.positions`, and the denoiser's logits there.
        overwrite_logits (`bool`, defaults to `False`): as in [`~losses.continuous_time_terms`].
    """
    shared = {"positions": positions, "overwrite_logits": overwrite_logits}
    sample, noisy, times = noise.sample, noise.noisy, noise.timesteps
    if noise.by_count:
        terms = masked_count_terms(scheduler, logits, sample, noisy, maskable=noise.maskable, **shared)
    elif noise.num_steps is not None:
        terms = discrete_time_terms(scheduler, logits, sample, noisy, times, noise.num_steps, **shared)
    else:
        terms = continuous_time_terms(scheduler, logits, sample, noisy, times, **shared)
    weights = noise.weights[terms.rows].to(terms.nats)
    return terms._replace(nats=weights * terms.nats, weights=weights * terms.weights)
