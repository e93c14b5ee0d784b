"""Noise for training and evaluation: a row's own, whatever batch, process or order it comes in."""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

# What a keyed stream is for: keys that are alike but for this have nothing to do with each other.
TIMES, MASKS, ORDER = 1, 2, 3


class NoisyRows(NamedTuple):
    """Rows and what noise made of them."""

    sample: torch.LongTensor  # [batch, seq], clean
    noisy: torch.LongTensor  # [batch, seq]
    uniforms: torch.Tensor  # [batch], the uniform numbers in (0, 1] that it came from
    timesteps: torch.Tensor  # [batch]
    positions: torch.LongTensor  # [n], flat indices of what is masked
    maskable: torch.BoolTensor  # [batch, seq]
    by_count: bool  # how it was drawn, which the estimator has to match


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
    generators: list[torch.Generator],
    by_count: bool,
) -> NoisyRows:
    r"""
    A noisy version of each row.

    Args:
        scheduler ([`AbsorbingStateScheduler`]): the noise.
        sample (`torch.LongTensor` of shape `[batch, seq]`), maskable (`torch.BoolTensor` of the same shape).
        uniforms (`torch.Tensor` of shape `[batch]`):
            In (0, 1], each uniform: the times of rows, or their masked share, rounded up to a number of tokens.
        generators (list of `torch.Generator`): one a row, for which of its tokens are masked.
        by_count (`bool`): whether the number of masked tokens is drawn, or each token by itself.
    """
    uniforms = uniforms.to(sample.device)
    if by_count:
        lengths = maskable.sum(dim=1)
        counts = (uniforms * lengths).ceil().long().clamp(max=lengths)
        noisy, timesteps = scheduler.add_noise_by_count(sample, counts, maskable=maskable, generator=generators)
    else:
        noisy, timesteps = scheduler.add_noise(sample, uniforms, maskable=maskable, generator=generators), uniforms
    positions = (maskable & (noisy == scheduler.mask_token_id)).flatten().nonzero().flatten()
    return NoisyRows(sample, noisy, uniforms, timesteps, positions, maskable, by_count)


def training_noise(scheduler, sample, maskable, args, step: int, rows: list[int], total: int) -> NoisyRows:
    r"""
    Noise of a training step, keyed by the seed, the step and the row.

    Args:
        scheduler, sample, maskable: as in [`draw_noise`].
        args ([`TextDiffusionTrainingArguments`]): how to draw it.
        step (`int`): the optimizer step, to which all `total` rows of all processes and accumulated batches belong.
        rows (`list[int]` of length batch): the numbers of these rows among them.
    """
    by_count = args.mask_sampling == "count"
    discrete = args.objective == "discrete"
    times = scheduler.sample_timesteps(
        total,
        generator=keyed_generator(TIMES, args.seed, step),
        num_steps=args.num_diffusion_steps if discrete else None,
        time_epsilon=0.0 if by_count or discrete else args.time_epsilon,
    )
    generators = [keyed_generator(MASKS, args.seed, step, row) for row in rows]
    return draw_noise(scheduler, sample, maskable, times[rows], generators, by_count)


def evaluation_noise(scheduler, sample, maskable, args, draw: int, keys: list[int], by_count: bool) -> NoisyRows:
    r"""
    Noise of an evaluation, the same in every one: it depends on a row's tokens alone. The times of a row's
    `args.eval_draws` draws are stratified.

    Args:
        draw (`int`): the number of this draw.
        keys (`list[int]` of length batch): of [`row_key`].
    """
    num_steps = args.num_diffusion_steps if args.objective == "discrete" else None
    times = [
        scheduler.sample_timesteps(args.eval_draws, generator=keyed_generator(TIMES, key), num_steps=num_steps)[draw]
        for key in keys
    ]
    generators = [keyed_generator(MASKS, key, draw) for key in keys]
    return draw_noise(scheduler, sample, maskable, torch.stack(times), generators, by_count)
