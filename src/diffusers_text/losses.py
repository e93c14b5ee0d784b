"""
The variational bound on the negative log-likelihood of masked diffusion, in continuous time and in T steps.

`p` is the prediction of [`AbsorbingStateScheduler`] (SUBS, tilted) and x the clean token. A masked position contributes,
in nats and as an estimate for one uniform time,

    -r_x log p_x + sum_k p_k (r_k - r_x)                       continuous time, r = g' / g
    T [-u_x log p_x + v_x (log v_x - log sum_k p_k v_k)]       step t -> s of T, v = g(s) / g(t), u = 1 - v

The first is MDLM's bound (arXiv 2406.07524, eq. 10) with the second part of MD4's general form (arXiv 2406.04329), which is 0
unless the schedule depends on the token. When the reverse process has to estimate its rates (spindle with the sentence
mean: rr, uu, vv in place of r, u, v), they become

    -r_x log p_x + r_x log(r_x / rr_x) - r_x + sum_k rr_k p_k
    T [-u_x log p_x + u_x log(u_x / uu_x) + v_x (log v_x - log sum_k p_k vv_k)]
"""

from typing import NamedTuple

import torch

from .schedulers.sampling import precise_dtype
from .schedulers.scheduling_absorbing_state import check_steps

REDUCTIONS = ("mean", "sum", "none")


def continuous_time_bound(
    scheduler,
    logits: torch.Tensor,
    sample: torch.LongTensor,
    noisy_sample: torch.LongTensor,
    timesteps: torch.Tensor,
    *,
    positions: torch.LongTensor | None = None,
    maskable: torch.BoolTensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    r"""
    Estimate of the continuous-time bound from one noisy version of each row, unbiased for times uniform on (0, 1].

    Args:
        scheduler ([`AbsorbingStateScheduler`]): what drew `noisy_sample`.
        logits (`torch.Tensor` of shape `[n, vocab]`, or `[batch, seq, vocab]` without `positions`):
            The denoiser's logits for `noisy_sample`.
        sample, noisy_sample (`torch.LongTensor` of shape `[batch, seq]`): clean tokens, and those of `add_noise`.
        timesteps (`torch.Tensor` of shape `[batch]`): times in (0, 1].
        positions (`torch.LongTensor` of shape `[n]`, *optional*):
            Flat indices over `batch * seq` of all masked positions.
        maskable (`torch.BoolTensor` of shape `[batch, seq]`, *optional*):
            Positions that could have been masked, all by default: the mean is over them.
        reduction (`str`, defaults to `"mean"`):
            `"mean"` in nats per maskable token, `"sum"` in nats, `"none"` in nats for each row, `[batch]`.

    Raises:
        ValueError: an unknown reduction, or shapes that do not fit.

    Example:

    ```python
    >>> import torch
    >>> from diffusers_text import AbsorbingStateScheduler, continuous_time_bound

    >>> scheduler = AbsorbingStateScheduler(mask_token_id=4)
    >>> sample, timesteps = torch.tensor([[0, 1, 2]]), torch.tensor([0.5])
    >>> noisy = torch.tensor([[4, 1, 4]])
    >>> continuous_time_bound(scheduler, torch.zeros(1, 3, 5), sample, noisy, timesteps)  # 2 / 0.5 * log(4) / 3
    tensor(1.8484)
    ```
    """
    masked = _masked_positions(scheduler, logits, sample, noisy_sample, timesteps, positions, reduction)
    if not scheduler.token_dependent:
        nats = -scheduler.rate_at(masked.times, None) * masked.log_softmax_target
    else:
        rate = scheduler.rate_at(masked.times, masked.true_offsets)
        log_p, expected_rate = _predict(scheduler, masked, lambda h, times: scheduler.rate_at(times, h))
        model_rate = scheduler.rate_at(masked.times, masked.offsets)
        nats = -rate * log_p + rate * (rate / model_rate).log() - rate + expected_rate
    return _reduce(nats, masked, sample.shape, maskable, reduction)


def discrete_time_bound(
    scheduler,
    logits: torch.Tensor,
    sample: torch.LongTensor,
    noisy_sample: torch.LongTensor,
    timesteps: torch.Tensor,
    num_steps: int,
    *,
    positions: torch.LongTensor | None = None,
    maskable: torch.BoolTensor | None = None,
    cross_entropy_weight: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    r"""
    Estimate of the bound of the T-step process, reconstruction included, unbiased for times uniform on `{1/T, ..., 1}`.

    Arguments as in [`continuous_time_bound`], and:

    Args:
        num_steps (`int`): T. `timesteps` lie on the grid `i / T`, as `sample_timesteps(..., num_steps=T)` draws them.
        cross_entropy_weight (`float`, defaults to 0):
            D3PM's hybrid loss (arXiv 2107.03006, eq. 5) adds this weight, 0.01 there, times the cross-entropy to the KL
            divergence of *one* step. The bound is T of those, so `cross_entropy_weight * T` times the cross-entropy is
            added here. The result is no bound.
    """
    check_steps("num_steps", num_steps)
    masked = _masked_positions(scheduler, logits, sample, noisy_sample, timesteps, positions, reduction)
    starts = ((masked.times * num_steps).round() - 1) / num_steps
    if not scheduler.token_dependent:
        log_p = masked.log_softmax_target
        nats = -(1 - scheduler.stay_probability(masked.times, starts, None)) * log_p
    else:
        stay = scheduler.stay_probability(masked.times, starts, masked.true_offsets)
        log_p, expected_stay = _predict(
            scheduler, masked, lambda h, times: scheduler.stay_probability(times, starts.view_as(times), h)
        )
        model_stay = scheduler.stay_probability(masked.times, starts, masked.offsets)
        reveal, model_reveal = 1 - stay, 1 - model_stay
        nats = -reveal * log_p + reveal * (reveal / model_reveal).log()
        # Both probabilities of staying are 0 in the last step, where the logarithms must leave no NaN in the gradient.
        last = stay == 0
        nats = nats + stay * (stay.masked_fill(last, 1).log() - expected_stay.masked_fill(last, 1).log())
    return _reduce(num_steps * (nats - cross_entropy_weight * log_p), masked, sample.shape, maskable, reduction)


class _Masked(NamedTuple):
    """What both bounds need of the masked positions; offsets are None for a token-independent schedule."""

    rows: torch.LongTensor  # [n]
    times: torch.Tensor  # [n]
    log_softmax: torch.Tensor  # [n, vocab], [MASK] ruled out
    log_softmax_target: torch.Tensor  # [n]
    true_offsets: torch.Tensor | None  # [n], h of the clean token as the noise saw it
    offsets: torch.Tensor | None  # [n], h of the clean token as the reverse process estimates it
    vocabulary_offsets: torch.Tensor | None  # [1 or n, vocab]


def _masked_positions(scheduler, logits, sample, noisy_sample, timesteps, positions, reduction) -> _Masked:
    if reduction not in REDUCTIONS:
        raise ValueError(f"`reduction` must be one of {REDUCTIONS}, got {reduction!r}.")
    if noisy_sample.shape != sample.shape or timesteps.shape != sample.shape[:1]:
        raise ValueError(
            f"`sample` {list(sample.shape)}, `noisy_sample` {list(noisy_sample.shape)} and `timesteps`"
            f" {list(timesteps.shape)} must have shapes [batch, seq], [batch, seq] and [batch]."
        )
    if logits.shape[:-1] != (sample.shape if positions is None else positions.shape):
        expected = "[batch, seq, vocab]" if positions is None else "[n, vocab] for n `positions`"
        raise ValueError(f"`logits` must have shape {expected}, got {list(logits.shape)}.")
    if positions is None:
        positions = (noisy_sample == scheduler.mask_token_id).flatten().nonzero().flatten()
        logits = logits.flatten(0, 1)[positions]

    rows = positions // sample.shape[1]
    targets = sample.flatten()[positions]
    # Half precision ends here: weights of 1 / t are out of its range.
    logits = logits if logits.dtype == torch.float64 else logits.float()
    is_mask = torch.arange(logits.shape[-1], device=logits.device) == scheduler.mask_token_id
    log_softmax = logits.masked_fill(is_mask, -torch.inf).log_softmax(dim=-1)
    offsets = (None, None, None)
    if scheduler.token_dependent:
        context = noisy_sample[rows]
        offsets = (
            scheduler.token_offsets(sample, sample).flatten()[positions],
            scheduler.token_offsets(targets[:, None], context).squeeze(-1),
            scheduler.vocabulary_offsets(logits.shape[-1], context),
        )
    times = timesteps.to(precise_dtype(logits.device))[rows]
    return _Masked(rows, times, log_softmax, log_softmax.gather(-1, targets[:, None]).squeeze(-1), *offsets)


def _predict(scheduler, masked: _Masked, ratio) -> tuple[torch.Tensor, torch.Tensor]:
    """
    log p_x and sum_k p_k ratio_k, both [n], where `ratio(h, times)` divides something by g(times).

    With the tilt `p_k = pi_k g_k / sum_j pi_j g_j`, pi the softmax. Since g and its numerators are affine in h, the sum over
    the vocabulary is the ratio at the mean offset `sum_k pi_k h_k`: no [n, vocab] of rates is formed.
    """
    softmax = masked.log_softmax.exp()
    h = masked.vocabulary_offsets
    if scheduler.config.tilt:
        h = h.to(softmax.dtype)
        mean_offset = (softmax @ h[0] if len(h) == 1 else (softmax * h).sum(dim=-1)).to(masked.times)
        tilt = scheduler.g_at(masked.times, masked.offsets).log() - scheduler.g_at(masked.times, mean_offset).log()
        return masked.log_softmax_target + tilt, ratio(mean_offset, masked.times)
    times = masked.times[:, None].to(softmax.dtype)
    return masked.log_softmax_target, (softmax * ratio(h.to(softmax.dtype), times)).sum(dim=-1).to(masked.times)


def _reduce(nats, masked: _Masked, shape, maskable, reduction):
    nats = nats.to(masked.log_softmax.dtype)
    if reduction == "none":
        return nats.new_zeros(shape[0]).index_add(0, masked.rows, nats)
    if reduction == "sum":
        return nats.sum()
    count = shape.numel() if maskable is None else maskable.sum().clamp_min(1)
    return nats.sum() / count


__all__ = ["continuous_time_bound", "discrete_time_bound"]
