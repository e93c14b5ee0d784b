"""
The variational bound on the negative log-likelihood of masked diffusion, in continuous time and in T steps.

`p` is the prediction of [`AbsorbingStateScheduler`] (SUBS, tilted) and x the clean token. Only [MASK] is ruled out
here: a corpus may hold ids that the sampler suppresses. A masked position contributes, in nats and as an estimate for
one uniform time,

    -r_x log p_x + sum_k p_k (r_k - r_x)                       continuous time, r = g' / g
    T [-u_x log p_x + v_x (log v_x - log sum_k p_k v_k)]       step t -> s of T, v = g(s) / g(t), u = 1 - v

The first is MDLM's bound (arXiv 2406.07524, eq. 10) with the second part of MD4's general form (arXiv 2406.04329),
which is 0 unless the schedule depends on the token. When the reverse process has to estimate its rates (spindle with
the sentence mean: rr, uu, vv in place of r, u, v), they become

    -r_x log p_x + r_x log(r_x / rr_x) - r_x + sum_k rr_k p_k
    T [-u_x log p_x + u_x log(u_x / uu_x) + v_x (log v_x - log sum_k p_k vv_k)]

For a schedule that treats all tokens alike, the number k of masked tokens of the row's L carries the weight as well:

    -(L / k) log p_x                                           k uniform on 1 .. L

has the expectation of the first form, with less variance.
"""

from typing import NamedTuple

import torch

from .schedulers.sampling import check_positive_int, check_times, precise_dtype, rows_at_a_time

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
    _check_reduction(reduction)
    terms = continuous_time_terms(scheduler, logits, sample, noisy_sample, timesteps, positions)
    return _reduce(terms, sample.shape, maskable, reduction)


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
    Estimate of the bound of the T-step process, reconstruction included, unbiased for uniform times on the grid
    `i / T`.

    Arguments as in [`continuous_time_bound`], and:

    Args:
        num_steps (`int`): T. `timesteps` lie on the grid `i / T`, as `sample_timesteps(..., num_steps=T)` draws them.
        cross_entropy_weight (`float`, defaults to 0):
            D3PM's hybrid loss (arXiv 2107.03006, eq. 5) adds this weight, 0.01 there, times the cross-entropy to the
            KL divergence of *one* step. The bound is T of those, so `cross_entropy_weight * T` times the cross-entropy
            is added here. The result is no bound.

    Example:

    ```python
    >>> import torch
    >>> from diffusers_text import AbsorbingStateScheduler, discrete_time_bound

    >>> scheduler = AbsorbingStateScheduler(mask_token_id=4)
    >>> sample, timesteps = torch.tensor([[0, 1, 2]]), torch.tensor([0.5])  # the step from 2/4 to 1/4
    >>> noisy = torch.tensor([[4, 1, 4]])
    >>> discrete_time_bound(scheduler, torch.zeros(1, 3, 5), sample, noisy, timesteps, 4)  # 4 * 2 * 1/2 * log(4) / 3
    tensor(1.8484)
    ```
    """
    _check_reduction(reduction)
    terms = discrete_time_terms(scheduler, logits, sample, noisy_sample, timesteps, num_steps, positions)
    terms = terms._replace(nats=terms.nats - num_steps * cross_entropy_weight * terms.log_p)
    return _reduce(terms, sample.shape, maskable, reduction)


def masked_count_bound(
    scheduler,
    logits: torch.Tensor,
    sample: torch.LongTensor,
    noisy_sample: torch.LongTensor,
    *,
    positions: torch.LongTensor | None = None,
    maskable: torch.BoolTensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    r"""
    Estimate of the continuous-time bound from one noisy version of each row, unbiased where the number of masked
    tokens is uniform on 1 to the row's number of maskable ones, as [`~AbsorbingStateScheduler.add_noise_by_count`]
    draws it: the cross-entropy, times that number, over the number of masked tokens.

    The expectation is that of [`continuous_time_bound`], for a schedule that treats all tokens alike; the variance is
    smaller. Arguments and result as there.

    Example:

    ```python
    >>> import torch
    >>> from diffusers_text import AbsorbingStateScheduler, masked_count_bound

    >>> scheduler = AbsorbingStateScheduler(mask_token_id=4)
    >>> sample, noisy = torch.tensor([[0, 1, 2]]), torch.tensor([[4, 1, 4]])
    >>> masked_count_bound(scheduler, torch.zeros(1, 3, 5), sample, noisy)  # 3 / 2 * 2 log(4) / 3
    tensor(1.3863)
    ```
    """
    _check_reduction(reduction)
    terms = masked_count_terms(scheduler, logits, sample, noisy_sample, positions, maskable)
    return _reduce(terms, sample.shape, maskable, reduction)


class BoundTerms(NamedTuple):
    """What each masked position, [n], has to do with a bound."""

    nats: torch.Tensor  # its part of the estimate
    weights: torch.Tensor  # what -log_p is multiplied with in it; over a row they sum up to its length, in expectation
    log_p: torch.Tensor  # log-probability of the clean token
    log_pi: torch.Tensor  # the same without the tilt, as the network predicts it
    correct: torch.BoolTensor  # whether no token has a higher one
    rows: torch.LongTensor


def continuous_time_terms(
    scheduler, logits, sample, noisy_sample, timesteps, positions=None, overwrite_logits=False
) -> BoundTerms:
    """
    [`continuous_time_bound`] before it is summed. With `overwrite_logits` the backward pass writes the gradient into
    the logits' own memory, which nobody may use any more; going backward twice is then an error of autograd's.
    """
    check_times(timesteps, len(sample), above_zero=True)
    masked = _masked_positions(scheduler, logits, sample, noisy_sample, timesteps, positions)
    rate = scheduler.noise.rate(masked.times, masked.true_offsets)
    log_p, expected_rate, log_pi, correct = _predict(scheduler, masked, scheduler.noise.rate, overwrite_logits)
    nats = -rate * log_p
    if scheduler.noise.token_dependent:
        model_rate = scheduler.noise.rate(masked.times, masked.offsets)
        nats = nats + rate * (rate / model_rate).log() - rate + expected_rate
    return _bound_terms(nats, rate, log_p, log_pi, correct, masked, scheduler.mask_token_id)


def discrete_time_terms(
    scheduler, logits, sample, noisy_sample, timesteps, num_steps, positions=None, overwrite_logits=False
) -> BoundTerms:
    """[`discrete_time_bound`] before it is summed; `overwrite_logits` as in [`continuous_time_terms`]."""
    check_positive_int("num_steps", num_steps)
    check_times(timesteps, len(sample), above_zero=True)
    masked = _masked_positions(scheduler, logits, sample, noisy_sample, timesteps, positions)
    index = (masked.times * num_steps).round()
    if index.device.type == "cpu" and not torch.allclose(index, masked.times * num_steps, atol=1e-3):
        raise ValueError(f"`timesteps` must lie on the grid i / {num_steps}: draw them with `num_steps={num_steps}`.")
    prev_times = (index - 1) / num_steps
    stay = scheduler.noise.stay_probability(masked.times, prev_times, masked.true_offsets)
    log_p, expected_stay, log_pi, correct = _predict(
        scheduler,
        masked,
        lambda t, h: scheduler.noise.stay_probability(t, prev_times.view_as(t), h),
        overwrite_logits,
    )
    reveal = 1 - stay
    nats = -reveal * log_p
    if scheduler.noise.token_dependent:
        model_reveal = 1 - scheduler.noise.stay_probability(masked.times, prev_times, masked.offsets)
        nats = nats + reveal * (reveal / model_reveal).log()
        # Both probabilities of staying are 0 in the last step, where the logarithms must leave no NaN in the gradient.
        last = stay == 0
        nats = nats + stay * (stay.masked_fill(last, 1).log() - expected_stay.masked_fill(last, 1).log())
    return _bound_terms(num_steps * nats, num_steps * reveal, log_p, log_pi, correct, masked, scheduler.mask_token_id)


def masked_count_terms(
    scheduler, logits, sample, noisy_sample, positions=None, maskable=None, overwrite_logits=False
) -> BoundTerms:
    """[`masked_count_bound`] before it is summed; `overwrite_logits` as in [`continuous_time_terms`]."""
    if scheduler.noise.token_dependent:
        raise ValueError(f"The schedule {scheduler.config.schedule!r} depends on the token: its bound needs times.")
    masked = _masked_positions(scheduler, logits, sample, noisy_sample, None, positions)
    log_pi, _, correct = SubsPrediction.apply(
        masked.logits, masked.targets, scheduler.mask_token_id, None, overwrite_logits
    )
    was_masked = (noisy_sample == scheduler.mask_token_id) & (sample != scheduler.mask_token_id)
    lengths = sample.shape[1] if maskable is None else maskable.sum(dim=1)
    weights = (lengths / was_masked.sum(dim=1).clamp_min(1))[masked.rows]  # [n]
    return _bound_terms(-weights * log_pi, weights, log_pi, log_pi, correct, masked, scheduler.mask_token_id)


class _Masked(NamedTuple):
    """What both bounds need of the masked positions; offsets are None for a token-independent schedule."""

    logits: torch.Tensor  # [n, vocab]
    rows: torch.LongTensor  # [n]
    times: torch.Tensor | None  # [n]
    targets: torch.LongTensor  # [n]
    true_offsets: torch.Tensor | None  # [n], h of the clean token as the noise saw it
    offsets: torch.Tensor | None  # [n], h of the clean token as the reverse process estimates it
    vocabulary_offsets: torch.Tensor | None  # [1 or n, vocab]


def _check_reduction(reduction):
    if reduction not in REDUCTIONS:
        raise ValueError(f"`reduction` must be one of {REDUCTIONS}, got {reduction!r}.")


def _masked_positions(scheduler, logits, sample, noisy_sample, timesteps, positions) -> _Masked:
    if noisy_sample.shape != sample.shape:
        raise ValueError(f"`noisy_sample` must have shape {list(sample.shape)}, got {list(noisy_sample.shape)}.")
    if logits.shape[:-1] != (sample.shape if positions is None else positions.shape):
        expected = "[batch, seq, vocab]" if positions is None else "[n, vocab] for n `positions`"
        raise ValueError(f"`logits` must have shape {expected}, got {list(logits.shape)}.")
    if positions is None:
        positions = (noisy_sample == scheduler.mask_token_id).flatten().nonzero().flatten()
        logits = logits.flatten(0, 1)[positions]

    rows = positions // sample.shape[1]
    targets = sample.flatten()[positions]
    offsets = (None, None, None)
    if scheduler.noise.token_dependent:
        context = noisy_sample[rows]
        offsets = (
            scheduler.noise.token_offsets(sample, sample).flatten()[positions],
            scheduler.noise.token_offsets(targets[:, None], context).squeeze(-1),
            scheduler.noise.vocabulary_offsets(logits.shape[-1], context, logits.device),
        )
    times = None if timesteps is None else timesteps.to(logits.device, precise_dtype(logits.device))[rows]
    return _Masked(logits, rows, times, targets, *offsets)


def _predict(
    scheduler, masked: _Masked, ratio, overwrite_logits
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """
    log p_x and sum_k p_k ratio_k, where `ratio(times, h)` divides something by g(times), then log pi_x and whether x
    is the most probable token, all [n]. The second is None for a token-independent schedule.

    With the tilt `p_k = pi_k g_k / sum_j pi_j g_j`, pi the softmax. Since g and its numerators are affine in h, the
    sum over the vocabulary is the ratio at the mean offset `sum_k pi_k h_k`: no [n, vocab] of rates is formed.
    """
    logits, mask_token_id, h = masked.logits, scheduler.mask_token_id, masked.vocabulary_offsets
    dtype = _loss_dtype(logits)
    if not scheduler.noise.token_dependent:
        log_pi, _, correct = SubsPrediction.apply(logits, masked.targets, mask_token_id, None, overwrite_logits)
        return log_pi, None, log_pi, correct
    if not scheduler.config.tilt:
        ratios = ratio(masked.times[:, None].to(dtype), h.to(dtype)).to(dtype)
        log_pi, expected, correct = SubsPrediction.apply(
            logits, masked.targets, mask_token_id, ratios, overwrite_logits
        )
        return log_pi.to(masked.times), expected.to(masked.times), log_pi, correct
    log_pi, mean_offset, correct = SubsPrediction.apply(
        logits, masked.targets, mask_token_id, h.to(dtype), overwrite_logits
    )
    mean_offset = mean_offset.to(masked.times)
    g, mean_g = scheduler.noise.g(masked.times, masked.offsets), scheduler.noise.g(masked.times, mean_offset)
    log_p = log_pi.to(masked.times) + g.log() - mean_g.log()
    return log_p, ratio(masked.times, mean_offset), log_pi, correct


class SubsPrediction(torch.autograd.Function):
    """
    log pi_x [n] and sum_k pi_k w_k [n] of pi = softmax(logits) with [MASK] ruled out (SUBS, MDLM), and whether x is
    the most probable token, bool [n].

    Forward and backward each pass over the logits [n, vocab] once, [`rows_at_a_time`], and keep nothing of that size
    beside them; with `overwrite_logits` the gradient takes their place. Half precision ends here: weights of 1 / t are
    out of its range. `weights` [1 or n, vocab] get no gradient.
    """

    @staticmethod
    def forward(ctx, logits, targets, mask_token_id, weights, overwrite_logits=False):
        log_target = logits.new_empty(len(logits), dtype=_loss_dtype(logits))
        log_normalizer, expected = torch.empty_like(log_target), torch.zeros_like(log_target)
        correct = torch.empty_like(targets, dtype=torch.bool)
        for rows in SubsPrediction.chunks(logits):
            scores = SubsPrediction.scores(logits[rows], mask_token_id)
            log_normalizer[rows] = scores.logsumexp(dim=-1)
            target_scores = scores.gather(-1, targets[rows, None]).squeeze(-1)
            log_target[rows] = target_scores - log_normalizer[rows]
            correct[rows] = target_scores == scores.amax(dim=-1)
            if weights is not None:
                pi = scores.sub_(log_normalizer[rows, None]).exp_()
                expected[rows] = pi @ weights[0] if len(weights) == 1 else (pi * weights[rows]).sum(dim=-1)
        ctx.save_for_backward(logits, targets, weights, log_normalizer, expected)
        ctx.mask_token_id, ctx.overwrite_logits = mask_token_id, overwrite_logits
        ctx.mark_non_differentiable(correct)
        return log_target, None if weights is None else expected, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_target, grad_expected, _):
        logits, targets, weights, log_normalizer, expected = ctx.saved_tensors
        grad_logits = logits if ctx.overwrite_logits else torch.empty_like(logits)
        for rows in SubsPrediction.chunks(logits):
            pi = SubsPrediction.scores(logits[rows], ctx.mask_token_id).sub_(log_normalizer[rows, None]).exp_()
            # d log pi_x / d logit_k = [k = x] - pi_k;   d sum_j pi_j w_j / d logit_k = pi_k (w_k - sum_j pi_j w_j)
            if weights is None:
                pi.mul_(-grad_log_target[rows, None])
            else:
                constant = grad_log_target[rows] + grad_expected[rows] * expected[rows]
                chunk_weights = weights if len(weights) == 1 else weights[rows]
                pi.mul_(grad_expected[rows, None] * chunk_weights - constant[:, None])
            pi.scatter_add_(-1, targets[rows, None], grad_log_target[rows, None])
            grad_logits[rows] = pi.to(logits.dtype)
        return grad_logits, None, None, None, None

    @staticmethod
    def chunks(logits):
        size = rows_at_a_time(logits.device, logits.shape[-1])
        return [slice(start, start + size) for start in range(0, len(logits), size)]

    @staticmethod
    def scores(logits, mask_token_id):
        """A copy of `logits` in the loss's precision, [MASK] ruled out."""
        scores = logits.to(_loss_dtype(logits), copy=True)
        if mask_token_id < scores.shape[-1]:
            scores[:, mask_token_id] = -torch.inf
        return scores


def _loss_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _bound_terms(nats, weights, log_p, log_pi, correct, masked: _Masked, mask_token_id) -> BoundTerms:
    # A clean token that is [MASK] itself was not masked by noise: there is nothing to predict.
    nothing = masked.targets == mask_token_id
    nats, weights, log_p, log_pi = (
        values.to(_loss_dtype(masked.logits)).masked_fill(nothing, 0) for values in (nats, weights, log_p, log_pi)
    )
    return BoundTerms(nats, weights, log_p, log_pi, correct, masked.rows)


def _reduce(terms: BoundTerms, shape, maskable, reduction):
    if reduction == "none":
        return terms.nats.new_zeros(shape[0]).index_add(0, terms.rows, terms.nats)
    if reduction == "sum":
        return terms.nats.sum()
    count = shape.numel() if maskable is None else maskable.sum().clamp_min(1)
    return terms.nats.sum() / count


__all__ = ["continuous_time_bound", "discrete_time_bound", "masked_count_bound"]
