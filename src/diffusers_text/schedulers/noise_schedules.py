"""
Noise schedules: the probability `g(t)` that a token is masked at time `t`, and its derivative, as pure functions.

Every schedule has the form `g_i(t) = base(t) + slope(t) * h_i`, with `g(0) = 0` and `g(1) = 1`. The number `h_i` says how
early token `i` is masked; schedules that treat all tokens alike have no slope. To add a schedule, write its functions and
name it in `NOISE_SCHEDULES`: training, bound and sampling all read it there.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

# At |h| = 1 / (pi lambda) the spindle's rate vanishes at an end of time; beyond it, g is no longer monotone.
SPINDLE_SLACK = 0.95


class NoiseSchedule(NamedTuple):
    """Functions `(t, config) -> (value, derivative)` of float times of any shape."""

    base: Callable
    slope: Callable | None = None


def linear(t, config):
    """`g = t`: D3PM's `1 / (T - t + 1)` and MDLM's log-linear schedule."""
    return t, torch.ones_like(t)


def cosine(t, config):
    """`g = cos(pi/2 (1 - t)) = sin(pi/2 t)` (MDLM, arXiv 2406.07524, appendix)."""
    angle = math.pi / 2 * t
    return torch.sin(angle), math.pi / 2 * torch.cos(angle)


def polynomial(t, config):
    """`g = t^power`."""
    return t**config.power, config.power * t ** (config.power - 1)


def geometric(t, config):
    """`alpha = exp(-sigma_min^(1-t) sigma_max^t)` (MDLM, appendix), rescaled so that g(0) = 0 and g(1) = 1."""
    log_ratio = math.log(config.sigma_max / config.sigma_min)
    growth = config.sigma_min * torch.expm1(t * log_ratio)  # sigma(t) - sigma(0), exact near t = 0
    scale = -math.expm1(config.sigma_min - config.sigma_max)  # (alpha(0) - alpha(1)) / alpha(0)
    return -torch.expm1(-growth) / scale, torch.exp(-growth) * (growth + config.sigma_min) * log_ratio / scale


def spindle_slope(t, config):
    """`lambda sin(pi t)` (DiffusionBERT, arXiv 2211.15029, eq. 9)."""
    scale = config.spindle_lambda
    # sin(pi t) = sin(pi (1 - t)), and the smaller angle is exact at both ends.
    return scale * torch.sin(math.pi * torch.minimum(t, 1 - t)), scale * math.pi * torch.cos(math.pi * t)


NOISE_SCHEDULES = {
    "linear": NoiseSchedule(linear),
    "loglinear": NoiseSchedule(linear),
    "cosine": NoiseSchedule(cosine),
    "polynomial": NoiseSchedule(polynomial),
    "geometric": NoiseSchedule(geometric),
    "spindle": NoiseSchedule(linear, spindle_slope),
}


def token_information(token_counts: list[int], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    How much each token says, and its mean over the corpus.

    Args:
        token_counts (`list[int]` of length vocab): occurrences in the training corpus; 0 is treated as 1.
        kind (`str`): `"surprisal"` is `H(x) = -log(relative frequency)` in nats (DiffusionBERT's paper);
            `"log_count"` is `w(x) = log(1 + count) / max log(1 + count)` (its released code).

    Returns:
        `torch.Tensor` of shape `[vocab]` and a scalar, float64.
    """
    counts = torch.tensor(token_counts, dtype=torch.float64)
    frequencies = counts / counts.sum()
    if kind == "surprisal":
        information = counts.sum().log() - counts.clamp_min(1).log()
    else:
        information = counts.clamp_min(1).log1p()
        information = information / information.max()
    return information, (frequencies * information).sum()


def spindle_offset(
    information: torch.Tensor, mean: torch.Tensor | float, kind: str, spindle_lambda: float
) -> torch.Tensor:
    r"""
    The spindle's `h` of tokens: positive for those that are masked early.

    `h = 1 - mean H / H(x)` (paper) or `mean w - w(x)` (released code), clamped to `|h| <= 0.95 / (pi lambda)`, where g is
    monotone in [0, 1]. The clamp is ours; the paper has none.

    Args:
        information, mean: of [`token_information`], broadcast against each other.
        kind (`str`): `"surprisal"` or `"log_count"`.
        spindle_lambda (`float`): strength of the spindle in [0, 1].
    """
    if spindle_lambda == 0:
        return torch.zeros_like(information * mean)
    h = 1 - mean / information.clamp_min(1e-12) if kind == "surprisal" else mean - information
    return h.clamp(-spindle_limit(spindle_lambda), spindle_limit(spindle_lambda))


def spindle_limit(spindle_lambda: float) -> float:
    """The largest `|h|` that [`spindle_offset`] returns."""
    return SPINDLE_SLACK / (math.pi * spindle_lambda) if spindle_lambda > 0 else 0.0
