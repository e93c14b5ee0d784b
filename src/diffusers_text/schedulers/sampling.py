"""
What every scheduler needs to draw tokens: uniforms from the caller's generator, shaped distributions, exact draws.
"""

import math
from collections.abc import Iterable, Iterator
from numbers import Integral, Real

import torch


def precise_dtype(device: torch.device | str) -> torch.dtype:
    """float64, or float32 on MPS, which has nothing finer."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def draw_uniforms(counts: list[int], generator, device, antithetic: bool = False) -> torch.Tensor:
    r"""
    Uniform numbers in [0, 1), `counts[i]` of them for row `i`, one row after another.

    Args:
        counts (`list[int]`): how many numbers each row needs.
        generator (`torch.Generator` or list of them, *optional*): one for all rows, or one for each, so that a row's
            numbers depend on neither the other rows nor padding. They are drawn on the generator's device and moved.
        antithetic (`bool`, defaults to `False`): give `1 - u` in their place, in [0, 1) as well.

    Returns:
        `torch.Tensor` of shape `[sum(counts)]`.
    """
    check_generator(generator, len(counts))
    if not isinstance(generator, list):
        counts, generator = [sum(counts)], [generator]
    sources = [device if g is None else g.device for g in generator]
    drawn = [
        torch.rand(n, generator=g, device=source, dtype=precise_dtype(source))
        for n, g, source in zip(counts, generator, sources, strict=True)
    ]
    if len(set(sources)) == 1:  # one transfer, not one a row
        drawn = [torch.cat(drawn)]
    uniforms = torch.cat([numbers.to(device, precise_dtype(device)) for numbers in drawn])
    return 1 - torch.finfo(uniforms.dtype).eps / 2 - uniforms if antithetic else uniforms


def is_number(value) -> bool:
    """Whether `value` is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def described(value) -> str:
    """A value as an error names it: of tensors the type and shape."""
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def check_sample(sample):
    """Raises unless `sample` is a LongTensor of shape [batch, seq]."""
    if not isinstance(sample, torch.Tensor) or sample.ndim != 2 or sample.dtype != torch.long:
        raise ValueError(f"`sample` must be a LongTensor of shape [batch, seq], got {described(sample)}.")


def check_same_shape(masked, begun):
    """Raises unless `masked` [batch, seq] has the shape of the canvas that the process began with."""
    if begun.shape != masked.shape:
        raise ValueError(
            f"`sample` has shape {list(masked.shape)}, the process began with {list(begun.shape)}: call"
            " `set_timesteps` to start a new one."
        )


def check_positive_int(name: str, value):
    """Raises unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")


def check_times(timesteps, batch_size: int, above_zero: bool = False):
    """Raises unless `timesteps` are floats of shape `[batch_size]` in [0, 1], or in (0, 1]."""
    if (
        not isinstance(timesteps, torch.Tensor)
        or not timesteps.is_floating_point()
        or timesteps.shape != (batch_size,)
    ):
        raise ValueError(f"`timesteps` must be a float tensor of shape [{batch_size}], got {described(timesteps)}.")
    # Looking at the values on an accelerator would wait for it.
    if timesteps.device.type == "cpu" and not ((timesteps >= 0) & (timesteps <= 1)).all():
        raise ValueError(f"`timesteps` must lie in [0, 1], got {timesteps.tolist()}.")
    if above_zero and timesteps.device.type == "cpu" and not (timesteps > 0).all():
        raise ValueError(f"`timesteps` must lie in (0, 1], got {timesteps.tolist()}.")


def check_counts(counts, lengths):
    """Raises unless `counts` are integers [batch] from 1 to `lengths` [batch], 0 where that is 0."""
    if not isinstance(counts, torch.Tensor) or counts.dtype != torch.long or counts.shape != lengths.shape:
        raise ValueError(f"`counts` must be a LongTensor of shape {list(lengths.shape)}, got {described(counts)}.")
    if counts.device.type == "cpu" and not ((counts >= lengths.clamp_max(1)) & (counts <= lengths)).all():
        raise ValueError(f"`counts` must lie between 1 and {lengths.tolist()}, got {counts.tolist()}.")


def check_generator(generator, batch_size: int):
    """Raises unless `generator` is None, a `torch.Generator`, or a list of `batch_size` of them."""
    generators = generator if isinstance(generator, list) else [] if generator is None else [generator]
    if isinstance(generator, list) and len(generator) != batch_size:
        raise ValueError(f"`generator` has {len(generator)} generators for {batch_size} rows; pass one, or one a row.")
    for one in generators:
        if not isinstance(one, torch.Generator):
            raise ValueError(f"`generator` must be a torch.Generator or a list of them, got {type(one).__name__}.")


def check_shaping(temperature, top_k, top_p):
    """Raises unless the three arguments of [`shape_logits`] are in range."""
    if not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"`temperature` must be a finite number >= 0, got {temperature!r}.")
    if top_k is not None and (type(top_k) is not int or top_k < 0):
        raise ValueError(f"`top_k` must be None or an integer >= 0, got {top_k!r}.")
    if top_p is not None and (not is_number(top_p) or not 0 < top_p <= 1):
        raise ValueError(f"`top_p` must be None or a number in (0, 1], got {top_p!r}.")


def rows_at_a_time(device: torch.device, vocab_size: int) -> int:
    """
    How many rows of logits [n, vocab] to work on together: 1 MiB in float32 stays in a CPU's cache; an accelerator
    takes 256 MiB, for few kernels in a bounded share of its memory.
    """
    return max(1, (2**18 if device.type == "cpu" else 2**26) // vocab_size)


def split_logits(logits: torch.Tensor | Iterable[torch.Tensor], num_rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
    r"""
    Logits [`rows_at_a_time`], with the rows that they are.

    Args:
        logits (`torch.Tensor` of shape `[num_rows, vocab]`, or an iterable of its consecutive pieces `[m, vocab]`).
        num_rows (`int`): how many rows there must be.

    Raises:
        ValueError: another number of rows.
    """
    if isinstance(logits, torch.Tensor):
        if logits.ndim != 2 or len(logits) != num_rows:
            raise ValueError(f"`logits` must have shape [{num_rows}, vocab], got {list(logits.shape)}.")
        logits = [logits]
    start = 0
    for piece in logits:
        for rows in piece.split(rows_at_a_time(piece.device, piece.shape[-1])):
            yield slice(start, start + len(rows)), rows
            start += len(rows)
    if start != num_rows:
        raise ValueError(f"`logits` must have {num_rows} rows, one for each of `positions`, got {start}.")


def check_finite(log_p: torch.Tensor):
    """
    Raises unless each row of `log_p` [n, vocab] has a largest value that is finite, which is NaN if one is. On an
    accelerator nothing is looked at: that would wait for it.
    """
    if log_p.device.type == "cpu" and not log_p.amax(dim=-1).isfinite().all():
        raise ValueError("`logits` hold NaN or infinity, or nothing but -inf for a position: nothing can be drawn.")


def shape_logits(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None) -> torch.Tensor:
    r"""
    Temperature, then top-k, then top-p, in the order of transformers; ruled-out tokens get -inf.

    Args:
        logits (`torch.Tensor` of shape `[n, vocab]`): unnormalised log-probabilities.
        temperature (`float`): divides the logits; 0 leaves only the argmax.
        top_k (`int`, *optional*): keep that many of the most probable tokens; 0 keeps all.
        top_p (`float`, *optional*): keep the fewest most probable tokens whose mass reaches `top_p`; 1 keeps all.
    """
    if temperature == 1 and not top_k and top_p in (None, 1):
        return logits
    if temperature == 0:
        argmax = logits.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, argmax, 0.0)
    # In double precision, and with the largest logit at 0, no temperature is too small or too large.
    logits = logits.to(precise_dtype(logits.device))
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if top_k and top_k < logits.shape[-1]:
        values, tokens = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, tokens, values)
    if top_p is not None and top_p < 1:
        values, tokens = logits.sort(dim=-1, descending=True)
        probs = values.softmax(dim=-1)
        values = values.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, tokens, values)
    return logits


def draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.LongTensor:
    r"""
    One token per row by inverting the cumulative distribution, summed in double precision, so that tails are whole.

    Args:
        logits (`torch.Tensor` of shape `[n, vocab]`): unnormalised log-probabilities, at least one finite in each row.
        uniforms (`torch.Tensor` of shape `[n]`): numbers in [0, 1), from where they are moved to the logits.

    Returns:
        `torch.LongTensor` of shape `[n]`.
    """
    uniforms = uniforms.to(precise_dtype(logits.device)).to(logits.device, non_blocking=True)
    # Weights relative to the largest need no more precision than the logits have; their sums do.
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    cdf = weights.cumsum(dim=-1, dtype=uniforms.dtype)  # [n, vocab]
    total = cdf[:, -1]
    # Rounding must not carry the target to the total, where tokens without probability would answer.
    target = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)


def write_tokens(sample: torch.LongTensor, positions: torch.LongTensor, ids: torch.LongTensor) -> torch.LongTensor:
    """A copy of `sample` [batch, seq] with `ids` [n] at flat `positions` [n]."""
    positions, ids = positions.to(sample.device), ids.to(sample.device)
    return sample.flatten().index_copy(0, positions, ids).view_as(sample)
