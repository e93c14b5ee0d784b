"""Estimates of the bound of rows with little variance, the same whenever they are taken."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..losses import BoundTerms
from ..noising import MASKS, TIMES, NoisyRows, draw_noise, keyed_generator
from ..schedulers.sampling import precise_dtype

# "count" draws how many tokens of a row are masked; "nonempty" a time, and noise that masks something; "independent"
# is MDLM's: a time, and each token by itself.
ESTIMATORS = ["count", "nonempty", "independent"]


def choose_estimator(scheduler, estimator: str | None, num_steps: int | None) -> str:
    r"""
    The estimator, by default that of least variance.

    Raises:
        ValueError: counts for a schedule that depends on the token, or for a bound in steps.
    """
    can_count = num_steps is None and not scheduler.noise.token_dependent
    if estimator is None:
        return "count" if can_count else "nonempty"
    if estimator not in ESTIMATORS:
        raise ValueError(f"`estimator` must be one of {ESTIMATORS}, got {estimator!r}.")
    if estimator == "count" and not can_count:
        raise ValueError(
            "`estimator='count'` needs continuous time and a schedule that treats all tokens alike, got"
            f" `num_inference_steps` {num_steps} and the schedule {scheduler.config.schedule!r}."
        )
    return estimator


def evaluation_noise(
    scheduler,
    sample: torch.LongTensor,
    maskable: torch.BoolTensor,
    keys: list[tuple[int, ...]],
    draw: int,
    estimator: str,
    num_steps: int | None = None,
    time_epsilon: float = 0.0,
) -> NoisyRows:
    r"""
    Noise of a draw, the same in every evaluation: it depends on a row's key alone. Draws `2 i` and `2 i + 1` are
    opposite, but for `"independent"`: where the one masks few tokens the other masks many, and with counts together
    they mask every token.

    Args:
        keys (`list[tuple[int, ...]]` of length batch): of each row, by [`~noising.row_key`].
        draw (`int`): the number of this draw.
        estimator (`str`), num_steps (`int`, *optional*), time_epsilon (`float`): as in [`likelihood_bound`].
    """
    number, antithetic = (draw, 0) if estimator == "independent" else divmod(draw, 2)
    uniforms = [1 - torch.rand(1, generator=keyed_generator(TIMES, *key, number), dtype=torch.float64) for key in keys]
    return draw_noise(
        scheduler,
        sample,
        maskable,
        torch.cat(uniforms),
        [keyed_generator(MASKS, *key, number) for key in keys],
        estimator == "count",
        num_steps=num_steps,
        time_epsilon=time_epsilon,
        nonempty=estimator == "nonempty",
        antithetic=bool(antithetic),
    )


class TokenControl:
    r"""
    A control variate out of earlier draws: where a token was masked before, its loss then tells much of its loss now.

    An estimate `sum_S w_i l_i` over the masked tokens S has weights with `E sum_S w_i c_i = sum_i c_i` for any c that
    does not know S. So `sum_S w_i (l_i - c_i) + sum_i c_i` has the same expectation, and little variance if `c_i` is
    the mean of a token's losses in earlier pairs of draws, or that of its row where it was not masked.

    Args:
        maskable (`torch.BoolTensor` of shape `[batch, seq]`): tokens that can be masked.
    """

    def __init__(self, maskable: torch.BoolTensor):
        self.maskable = maskable
        shape, device = maskable.shape, maskable.device
        self.sums, self.counts, self.losses = torch.zeros(3, *shape, dtype=precise_dtype(device), device=device)
        self._pending = []

    def correct(self, noise: NoisyRows, terms: BoundTerms) -> torch.Tensor:
        """What has to be added to each row's estimate, [batch], in nats. Takes note of the losses."""
        weights = torch.zeros_like(self.losses).flatten()
        weights[noise.positions] = terms.weights.to(weights)
        correction = ((self.maskable.to(weights) - weights.view_as(self.losses)) * self.losses).sum(dim=1)
        self._pending.append((noise.positions, -terms.log_p.to(weights)))
        if len(self._pending) == 2:  # the draws of a pair know each other
            self._learn()
        return correction

    def _learn(self):
        for positions, losses in self._pending:
            self.sums.view(-1)[positions] += losses
            self.counts.view(-1)[positions] += 1
        self._pending = []
        of_row = self.sums.sum(dim=1, keepdim=True) / self.counts.sum(dim=1, keepdim=True).clamp_min(1)
        self.losses = torch.where(self.counts > 0, self.sums / self.counts.clamp_min(1), of_row)


def draw_estimates(
    scheduler,
    sample: torch.LongTensor,
    maskable: torch.BoolTensor,
    keys: list[tuple[int, ...]],
    draws: range,
    terms_of: Callable[[NoisyRows], BoundTerms],
    estimator: str,
    num_steps: int | None = None,
    time_epsilon: float = 0.0,
) -> Iterator[tuple[NoisyRows, BoundTerms, torch.Tensor]]:
    r"""
    The estimates of rows, a draw at a time: noise, what masked tokens contribute, and the bound of each row, `[batch]`
    in nats.

    Args:
        draws (`range`): the numbers of the draws, of whole pairs.
        terms_of (`Callable`): the model's [`~losses.BoundTerms`] for noisy rows.
    """
    control = TokenControl(maskable)
    for draw in draws:
        noise = evaluation_noise(scheduler, sample, maskable, keys, draw, estimator, num_steps, time_epsilon)
        terms = terms_of(noise)
        nats = torch.zeros(len(sample), dtype=control.losses.dtype, device=sample.device)
        nats = nats.index_add(0, terms.rows, terms.nats.to(nats))
        # MDLM's estimator is left as it is; with a cut, its weights have another mean.
        yield noise, terms, nats if estimator == "independent" else nats + control.correct(noise, terms)


def pair_variance(nats: np.ndarray) -> np.ndarray:
    r"""
    The variance of rows' mean estimates, `[rows]`, by the scatter of their pairs of draws.

    Estimates of different pairs are uncorrelated also where earlier ones serve later ones as a control, so this has no
    bias.

    Args:
        nats (`np.ndarray` of shape `[rows, draws]`): estimates, of at least two pairs.
    """
    pairs = nats.reshape(len(nats), -1, 2).mean(axis=2)
    return pairs.var(axis=1, ddof=1) / pairs.shape[1]


def corpus_error(nats: np.ndarray, tokens: float) -> float:
    """The standard error, in nats per token, of the mean estimates of all rows, `[rows, draws]` in nats."""
    return math.sqrt(pair_variance(nats).sum()) / max(tokens, 1)
