"""What is counted of noisy rows, and the figures that it makes."""

import math

import numpy as np
import torch

from ..evaluation.estimators import corpus_error
from ..losses import BoundTerms
from ..noising import NoisyRows
from ..schedulers.sampling import precise_dtype

NUM_BUCKETS = 5  # of time
# Sums over masked tokens; `tokens` are all that could have been masked. Then nats and tokens by the time of the row,
# or by its masked share where that is what was drawn.
COUNTED = ["nats", "tokens", "masked", "cross_entropy", "correct", "terminators"]


def row_sums(terms: BoundTerms, noise: NoisyRows, terminator: int | None) -> torch.Tensor:
    r"""
    What each row adds to the figures of [`figures`].

    Args:
        terms ([`~losses.BoundTerms`]): of the masked positions.
        noise ([`~noising.NoisyRows`]): how they were masked.
        terminator (`int`, *optional*): the token that ends a text.

    Returns:
        `torch.Tensor` of shape `[batch, len(COUNTED) + 2 * NUM_BUCKETS]`.
    """
    targets = noise.sample.flatten()[noise.positions]
    weights = noise.weights[terms.rows]  # of the nats they are a part already
    of_positions = torch.stack(
        [
            terms.nats,
            torch.zeros_like(terms.nats),
            weights,
            -weights * terms.log_pi,
            weights * terms.correct,
            weights * (targets == (-1 if terminator is None else terminator)),
        ],
        dim=1,
    ).to(precise_dtype(targets.device))
    sums = of_positions.new_zeros(len(noise.sample), len(COUNTED)).index_add(0, terms.rows, of_positions)
    sums[:, 1] = noise.maskable.sum(dim=1)
    bucket = (noise.levels * NUM_BUCKETS).ceil().long().clamp(1, NUM_BUCKETS) - 1
    in_bucket = torch.nn.functional.one_hot(bucket, NUM_BUCKETS).to(sums)  # [batch, buckets]
    row_weights = noise.level_weights[:, None].to(sums)
    return torch.cat([sums, sums[:, :1] * in_bucket, sums[:, 1:2] * row_weights * in_bucket], dim=1)


def figures(sums: torch.Tensor | np.ndarray) -> dict[str, float]:
    r"""
    The figures of summed [`row_sums`], `[len(COUNTED) + 2 * NUM_BUCKETS]`: the bound in nats and bits per maskable
    token, the cross-entropy in nats and the accuracy per masked token, the share of end-of-text among these, and the
    bound by time (by the masked share where counts are drawn).
    """
    nats, tokens, masked, cross_entropy, correct, terminators, *by_time = sums.tolist()
    result = {
        "bound": nats / max(tokens, 1),
        "bound_bits": nats / max(tokens, 1) / math.log(2),
        "masked_cross_entropy": cross_entropy / max(masked, 1),
        "masked_accuracy": correct / max(masked, 1),
        "end_of_text_share": terminators / max(masked, 1),
    }
    for i in range(NUM_BUCKETS):
        name = f"bound_time_{i / NUM_BUCKETS:g}_to_{(i + 1) / NUM_BUCKETS:g}"
        if by_time[NUM_BUCKETS + i] > 0:
            result[name] = by_time[i] / by_time[NUM_BUCKETS + i]
    return result


def evaluation_figures(sums: np.ndarray) -> dict[str, float]:
    r"""
    [`figures`] of several draws of the noise, and `bound_standard_error`, that of the noise, for the same rows.

    Args:
        sums (`np.ndarray` of shape `[rows, draws, len(COUNTED) + 2 * NUM_BUCKETS]`): [`row_sums`] of each draw.
    """
    error = corpus_error(sums[..., 0], sums[:, 0, 1].sum())
    return {**figures(sums.sum(axis=(0, 1))), "bound_standard_error": error}
