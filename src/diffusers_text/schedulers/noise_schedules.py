"""
Noise schedules: the probability `g(t)` that a token is masked at time `t`, and its derivative.

Every schedule has the form `g_i(t) = base(t) + spread(t) * h_i`, with `g(0) = 0` and `g(1) = 1`. The number `h_i`, its
offset, says how early token `i` is masked; schedules that treat all tokens alike have no spread. To add a schedule,
write its functions and name it in `NOISE_SCHEDULES`: training, bound and sampling all read it there.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .sampling import is_number, precise_dtype

# At |h| = 1 / (pi lambda) the spindle's rate vanishes at an end of time; beyond it, g is no longer monotone.
SPINDLE_SLACK = 0.95


class NoiseSchedule(NamedTuple):
    """Functions `(t, config) -> (value, derivative)` of float times of any shape."""

    base: Callable
    spread: Callable | None = None


def linear(t, config):
    """`g = t`: D3PM's `1 / (T - t + 1)` and MDLM's log-linear schedule."""
    return t, torch.ones_like(t)


def cosine(t, config):
    """`g = cos(pi/2 (1 - t)) = sin(pi/2 t)` (the cosine schedule of MDLM, arXiv 2406.07524)."""
    angle = math.pi / 2 * t
    return torch.sin(angle), math.pi / 2 * torch.cos(angle)


def polynomial(t, config):
    """`g = t^power`."""
    return t**config.power, config.power * t ** (config.power - 1)


def geometric(t, config):
    """`alpha = exp(-sigma_min^(1-t) sigma_max^t)` (MDLM), rescaled so that g(0) = 0 and g(1) = 1."""
    log_ratio = math.log(config.sigma_max / config.sigma_min)
    growth = config.sigma_min * torch.expm1(t * log_ratio)  # sigma(t) - sigma(0), exact near t = 0
    scale = -math.expm1(config.sigma_min - config.sigma_max)  # (alpha(0) - alpha(1)) / alpha(0)
    return -torch.expm1(-growth) / scale, torch.exp(-growth) * (growth + config.sigma_min) * log_ratio / scale


def spindle_spread(t, config):
    """`lambda sin(pi t)` (the spindle of DiffusionBERT, arXiv 2211.15029)."""
    scale = config.spindle_lambda
    # sin(pi t) = sin(pi (1 - t)), and the smaller angle is exact at both ends.
    return scale * torch.sin(math.pi * torch.minimum(t, 1 - t)), scale * math.pi * torch.cos(math.pi * t)


NOISE_SCHEDULES = {
    "linear": NoiseSchedule(linear),
    "loglinear": NoiseSchedule(linear),
    "cosine": NoiseSchedule(cosine),
    "polynomial": NoiseSchedule(polynomial),
    "geometric": NoiseSchedule(geometric),
    "spindle": NoiseSchedule(linear, spindle_spread),
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

    `h = 1 - mean H / H(x)` (paper) or `mean w - w(x)` (released code), clamped to `|h| <= 0.95 / (pi lambda)`, where g
    is monotone in [0, 1]. The clamp is ours; the paper has none.

    Args:
        information, mean: of [`token_information`], broadcast against each other.
        kind (`str`): `"surprisal"` or `"log_count"`.
        spindle_lambda (`float`): strength of the spindle in [0, 1].
    """
    h = 1 - mean / information.clamp_min(1e-12) if kind == "surprisal" else mean - information
    return h.clamp(-spindle_limit(spindle_lambda), spindle_limit(spindle_lambda))


def spindle_limit(spindle_lambda: float) -> float:
    """The largest `|h|` that [`spindle_offset`] returns."""
    return SPINDLE_SLACK / (math.pi * spindle_lambda) if spindle_lambda > 0 else 0.0


class MaskingNoise:
    r"""
    The schedule of a scheduler's config: what training, bound and sampling share.

    Offsets `h` broadcast against times; they are None for a schedule that treats all tokens alike. Their `context`
    matters for `spindle_mean="sentence"` alone; elsewhere an offset belongs to the token.
    """

    def __init__(self, config):
        check_noise(config)
        self.config = config
        self.base, self.spread = NOISE_SCHEDULES[config.schedule]
        self.token_dependent = self.spread is not None
        # Whether offsets depend on the row that a token stands in.
        self.needs_context = self.token_dependent and config.spindle_mean == "sentence"
        self._vocabulary_offsets = None
        if self.token_dependent:
            # The last entry is for ids beyond the tokenizer, which a padded head has: tokens that never occur.
            information, mean = token_information([*config.token_counts, 0], config.spindle_information)
            self._information = {information.device: information}  # on each device that asked for it
            self._corpus_mean = mean.item()

    def g(self, t: torch.Tensor, offsets: torch.Tensor | float | None) -> torch.Tensor:
        """g(t) = base(t) + spread(t) h: the probability of being masked at `t`."""
        return self.g_and_derivative(t, offsets)[0]

    def rate(self, t: torch.Tensor, offsets: torch.Tensor | float | None) -> torch.Tensor:
        """r(t) = g'(t) / g(t): the rate at which masked positions are revealed."""
        g, derivative = self.g_and_derivative(t, offsets)
        return derivative / g

    def stay_probability(self, t: torch.Tensor, s: torch.Tensor, offsets: torch.Tensor | float | None) -> torch.Tensor:
        """v = g(s) / g(t): the probability that a position masked at `t` still is at `s < t`."""
        return self.g(s, offsets) / self.g(t, offsets)

    def g_and_derivative(self, t, offsets) -> tuple[torch.Tensor, torch.Tensor]:
        """g(t) and g'(t)."""
        base, base_derivative = self.base(t, self.config)
        if not self.token_dependent:
            return base, base_derivative
        spread, spread_derivative = self.spread(t, self.config)
        return base + spread * offsets, base_derivative + spread_derivative * offsets

    def time_of(self, level: torch.Tensor, latest: torch.Tensor, offset: float | None) -> torch.Tensor:
        r"""
        Solves `g(tau) = level` for tau in (0, latest], by Newton's method inside a shrinking bracket.

        Args:
            level, latest (`torch.Tensor` of shape `[n]`): what g shall be, and the largest time it may be at.
            offset (`float`, *optional*): h of the token, None for a schedule that treats all alike.
        """
        low, high = torch.zeros_like(latest), latest.clone()
        tau = latest * level
        for _ in range(100):
            g, derivative = self.g_and_derivative(tau, offset)
            low, high = torch.where(g < level, tau, low), torch.where(g < level, high, tau)
            newton = tau - (g - level) / derivative
            inside = (newton >= low) & (newton <= high)  # False for a division by zero, too
            following = torch.where(inside, newton, (low + high) / 2)
            converged = (following - tau).abs() <= 1e-15 * tau
            tau = following
            if converged.all():
                break
        return tau

    def token_offsets(
        self, token_ids: torch.LongTensor | None, context: torch.LongTensor | None
    ) -> torch.Tensor | None:
        r"""
        The offsets `h` of tokens.

        Args:
            token_ids (`torch.LongTensor` of shape `[batch or 1, m]`): the tokens.
            context (`torch.LongTensor` of shape `[batch, seq]`, *optional*):
                The rows whose mean information counts with `spindle_mean="sentence"`, clean or partly masked; not
                looked at otherwise.

        Returns:
            `torch.Tensor` of shape `[batch or 1, m]`, or None.
        """
        if not self.token_dependent:
            return None
        if token_ids is None:
            raise ValueError(f"`input_ids` are required: the schedule {self.config.schedule!r} depends on the token.")
        information, mean = self._information_of(token_ids), self._mean_information(context)
        return spindle_offset(information, mean, self.config.spindle_information, self.config.spindle_lambda)

    def vocabulary_offsets(
        self, vocab_size: int, context: torch.LongTensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """The offsets of all ids up to `vocab_size`: `[1, vocab]`, or `[batch, vocab]` with the sentence mean."""
        kept = self._vocabulary_offsets
        if kept is not None and kept.shape[1] == vocab_size and kept.device == device:
            return kept
        offsets = self.token_offsets(torch.arange(vocab_size, device=device)[None], context)
        self._vocabulary_offsets = None if self.needs_context else offsets
        return offsets

    def smallest_offset(self, suppressed: torch.BoolTensor) -> float:
        """
        The smallest offset among tokens that are not `suppressed` [vocab]. No other is revealed faster, at any time:
        rates fall with h, since t S'(t) <= S(t) for the spindle's spread S = lambda sin(pi t).
        """
        if self.config.spindle_mean == "sentence":
            return -spindle_limit(self.config.spindle_lambda)
        offsets = self.token_offsets(torch.arange(len(suppressed))[None], None)
        return offsets[0, ~suppressed].min().item()

    def _information_of(self, token_ids):
        device = token_ids.device
        if device not in self._information:
            on_cpu = self._information[torch.device("cpu")]
            self._information[device] = on_cpu.to(device, precise_dtype(device))
        information = self._information[device]
        return information[token_ids.clamp_max(len(information) - 1)]

    def _mean_information(self, context):
        if self.config.spindle_mean == "corpus":
            return self._corpus_mean
        left_out = torch.tensor(self.config.suppressed_token_ids or [], device=context.device)
        counted = ~torch.isin(context, left_out)
        masked = context == self.config.mask_token_id
        information = self._information_of(context).masked_fill(masked, self._corpus_mean)
        lengths = counted.sum(dim=1, keepdim=True)
        mean = (information * counted).sum(dim=1, keepdim=True) / lengths
        return mean.masked_fill(lengths == 0, self._corpus_mean)  # [batch, 1]


def check_noise(config):
    """Raises a `ValueError` for the first setting of a noise schedule that is out of range."""
    for name, allowed in (
        ("schedule", list(NOISE_SCHEDULES)),
        ("spindle_information", ["surprisal", "log_count"]),
        ("spindle_mean", ["corpus", "sentence"]),
    ):
        if config[name] not in allowed:
            raise ValueError(f"`{name}` must be one of {allowed}, got {config[name]!r}.")
    for name in ("spindle_lambda", "power", "sigma_min", "sigma_max"):
        if not is_number(config[name]):
            raise ValueError(f"`{name}` must be a number, got {config[name]!r}.")
    if not 0 <= config.spindle_lambda <= 1:
        raise ValueError(f"`spindle_lambda` must lie in [0, 1], got {config.spindle_lambda!r}.")
    if not config.power > 0:
        raise ValueError(f"`power` must be > 0, got {config.power!r}.")
    if not 0 < config.sigma_min < config.sigma_max:
        raise ValueError(f"0 < sigma_min < sigma_max must hold, got {config.sigma_min!r} and {config.sigma_max!r}.")
    counts = config.token_counts
    if counts is None:
        if NOISE_SCHEDULES[config.schedule].spread is not None:
            raise ValueError(
                f"`schedule={config.schedule!r}` needs `token_counts`: pass"
                " `token_counts=count_tokens(dataset, tokenizer)`."
            )
        return
    if not isinstance(counts, list):
        raise ValueError(f"`token_counts` must be a list, as `count_tokens` returns it, got {type(counts).__name__}.")
    wrong = [n for n in counts if type(n) is not int or n < 0]
    if wrong or not any(counts):
        given = repr(wrong[0]) if wrong else "nothing but 0"
        raise ValueError(f"`token_counts` must be integers >= 0, not all of them 0, got {given}.")
    if config.vocab_size is not None and len(counts) != config.vocab_size:
        raise ValueError(
            f"`token_counts` has {len(counts)} entries for a vocabulary of {config.vocab_size}: call"
            " `count_tokens(dataset, tokenizer)` with this model's tokenizer."
        )
