"""Confidence unmasking: the positions that the denoiser is surest of are revealed first."""

import math
from collections.abc import Iterable

import torch
from diffusers.configuration_utils import register_to_config

from .sampling import check_positive_int, check_same_shape, is_number, write_tokens
from .scheduling_absorbing_state import AbsorbingStateScheduler, AbsorbingStateSchedulerOutput

CRITERIA = ["probability", "margin", "entropy"]
RULES = ["count", "threshold", "entropy_bound"]


class ConfidenceUnmaskingScheduler(AbsorbingStateScheduler):
    r"""
    Reveals the masked positions with the highest confidence first, as MaskGIT (arXiv 2202.04200) and LLaDA (arXiv
    2502.09992) do, or as many at once as an entropy bound allows (EB-sampler, arXiv 2505.24857).

    In each forward pass every masked position gets a candidate `x ~ p` and a confidence in [0, 1]:

        probability     p(x) of the candidate
        margin          difference of the two largest probabilities
        entropy         exp(-H(p)), the inverse perplexity

    and the rule says which candidates are kept; the others stay masked:

        count           the k most confident; after the step from t to s, floor(g(s) L) of a row's L masked positions
                        remain (MaskGIT with `schedule="cosine"`, LLaDA with `"linear"`); continuous time is k = 1
        threshold       all above `threshold`, at least one
        entropy_bound   in order of confidence the longest run U with sum_U H - max_U H <= `entropy_bound`, at least
                        one

    `p` is the denoiser's prediction without the tilt of a token-dependent schedule: the order of unmasking is not that
    of the noise, so it says nothing about the token. Confidence is that of `p` before temperature, top-k and top-p.
    The samples follow no diffusion's law, and greedy orders favour frequent tokens. Revealed tokens are never taken
    back.

    Deviations: of what remains masked the floor is taken, as in MaskGIT's code, where the papers of MaskGIT and LLaDA
    have the ceiling. MaskGIT's code anneals its noise by the time after the step, here it is the one before.

    Args:
        criterion (`str`, defaults to `"probability"`): `"probability"`, `"margin"` or `"entropy"`.
        rule (`str`, defaults to `"count"`): `"count"`, `"threshold"` or `"entropy_bound"`.
        threshold (`float`, defaults to 0.9): confidence in [0, 1) above which a candidate is kept.
        entropy_bound (`float`, defaults to 0.1): nats, >= 0, of the rule of that name.
        position_temperature (`float`, defaults to 0.0):
            Adds Gumbel noise to the log-confidence by which positions are ordered, `position_temperature * t` times
            (MaskGIT's annealed choice). It changes the order, never a confidence, which is what the threshold sees.
        mask_token_id, vocab_size, suppressed_token_ids, gen_length, temperature, top_k, top_p:
            As in [`AbsorbingStateScheduler`].
        schedule, power, sigma_min, sigma_max, spindle_lambda, spindle_information, spindle_mean, token_counts, corpus,
        tilt:
            As in [`AbsorbingStateScheduler`]: the noise that the denoiser was trained with. Of a token-dependent
            schedule the rule `count` uses the part that is common to all tokens.

    Example:

    ```python
    >>> from diffusers_text import AbsorbingStateScheduler, ConfidenceUnmaskingScheduler

    >>> scheduler = AbsorbingStateScheduler(mask_token_id=4)
    >>> ConfidenceUnmaskingScheduler.from_config(scheduler.config, criterion="entropy").config.criterion
    'entropy'
    ```
    """

    @register_to_config
    def __init__(
        self,
        mask_token_id: int | None = None,
        vocab_size: int | None = None,
        suppressed_token_ids: list[int] | None = None,
        schedule: str = "linear",
        power: float = 2.0,
        sigma_min: float = 1e-5,
        sigma_max: float = 20.0,
        spindle_lambda: float = 0.3,
        spindle_information: str = "surprisal",
        spindle_mean: str = "corpus",
        token_counts: list[int] | None = None,
        corpus: str | None = None,
        tilt: bool = True,
        gen_length: int = 64,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        criterion: str = "probability",
        rule: str = "count",
        threshold: float = 0.9,
        entropy_bound: float = 0.1,
        position_temperature: float = 0.0,
    ):
        for name, value, allowed in (("criterion", criterion, CRITERIA), ("rule", rule, RULES)):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}.")
        if not is_number(threshold) or not 0 <= threshold < 1:
            raise ValueError(f"`threshold` must be a number in [0, 1), got {threshold!r}.")
        for name, value in (("entropy_bound", entropy_bound), ("position_temperature", position_temperature)):
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be a finite number >= 0, got {value!r}.")
        self._prepare()

    def set_timesteps(self, num_inference_steps: int | None = None, device: torch.device | str | None = None):
        r"""
        Starts a new reverse process.

        Args:
            num_inference_steps (`int`, *optional*):
                Number of steps T of the rule `count`; None reveals one position after another. The other rules decide
                themselves how many forward passes they take.
            device (`torch.device`, *optional*): where `timesteps` lie.
        """
        if num_inference_steps is not None and self.config.rule != "count":
            check_positive_int("num_inference_steps", num_inference_steps)
            raise ValueError(
                f"`num_inference_steps` must be None with `rule={self.config.rule!r}`, got {num_inference_steps}: the"
                " confidence decides how many positions are revealed."
            )
        super().set_timesteps(num_inference_steps, device)

    def _begin(self, num_inference_steps, device):
        super()._begin(num_inference_steps, device)
        self._owned = None  # [batch, seq], where the process could reveal tokens when it began
        self._begun_with = None  # [batch], masked positions of each row when the process began
        self._due = None  # [batch], how many of them the next step reveals

    def next_positions(
        self,
        sample: torch.LongTensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        active: torch.BoolTensor | None = None,
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        r"""
        All masked positions, and the time of each row; arguments and result as in
        [`AbsorbingStateScheduler.next_positions`]. Steps of the rule `count` that would reveal nothing are left out.
        Without steps a row's time is where `g(t)` is the share of its positions that are masked.
        """
        masked = self._masked(sample, active)
        remaining = masked.sum(dim=1)
        if self._begun_with is None:
            self._owned, self._begun_with = masked, remaining
        check_same_shape(masked, self._owned)
        self._asked = masked
        if self.num_inference_steps is None:
            share = (remaining / self._begun_with.clamp_min(1)).double().clamp(max=1.0)
            row_times = self.noise.time_of(share, torch.ones_like(share), offset=0.0)
            self._due = torch.ones_like(remaining)
        else:
            steps = torch.arange(1, self.num_inference_steps + 1, dtype=torch.float64)
            left = self._left_at(1 - steps[None] / self.num_inference_steps)  # [batch, T], after each step
            step = (left < remaining[:, None]).long().argmax(dim=1)  # the first that reveals something
            row_times = 1 - step.double() / self.num_inference_steps
            self._due = remaining - left.gather(1, step[:, None])[:, 0]
        return masked.flatten().nonzero().flatten(), row_times.masked_fill(remaining == 0, 0.0)

    def _left_at(self, times):
        """How many positions of each row are masked at `times` [1 or batch, m], floor(g(s) L): [batch, m]."""
        return (self.noise.g(times, 0.0) * self._begun_with[:, None] + 1e-9).floor().long()

    @torch.no_grad()
    def step(
        self,
        logits: torch.Tensor | Iterable[torch.Tensor],
        timestep: torch.Tensor | float,
        sample: torch.LongTensor,
        *,
        positions: torch.LongTensor | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        return_dict: bool = True,
    ) -> AbsorbingStateSchedulerOutput | tuple:
        r"""
        Draws a candidate at each of `positions` and reveals the most confident ones. Arguments, result and errors as
        in [`AbsorbingStateScheduler.step`], but that `positions` may be left out in continuous time, too.
        """
        times = self._row_times(timestep, sample)
        prev_times = self._previous_times(times)  # [batch], None in continuous time
        planned = positions is not None
        positions, asked_logits = self._asked_for(positions, logits, sample)
        rows = positions // sample.shape[1]
        if not planned:
            self.next_positions(sample)
            if prev_times is not None:
                remaining = torch.bincount(rows, minlength=len(sample))
                self._due = (remaining - self._left_at(prev_times[:, None])[:, 0]).clamp_min(0)
        with_noise = self.config.position_temperature > 0
        uniforms = self._row_uniforms(rows, len(sample), 2 if with_noise else 1, generator)
        shaping = self._shaping(temperature, top_k, top_p)
        tokens, confidence, entropy = self._draw(asked_logits, uniforms[:, 0], shaping, scores=self._confidence)

        order_by = confidence.log()
        if with_noise:
            gumbel = -(-(1 - uniforms[:, 1]).log()).log()  # of uniforms in (0, 1]
            order_by = order_by + self.config.position_temperature * times[rows] * gumbel
        kept = self._kept(order_by, confidence, entropy, rows)
        revealed = tokens.where(kept, self.mask_token_id)
        self._asked = None
        return self._output(write_tokens(sample, positions, revealed), sample, positions, tokens, logits, return_dict)

    def _confidence(self, log_p, tokens):
        """Confidence [m] of candidates `tokens` [m] under unnormalised log p [m, vocab]; entropy [m] in nats."""
        log_p = log_p.log_softmax(dim=-1)
        entropy = log_p.new_zeros(len(log_p))  # stays 0 where nothing asks for it
        if self.config.criterion == "entropy" or self.config.rule == "entropy_bound":
            entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
        if self.config.criterion == "probability":
            confidence = log_p.gather(-1, tokens[:, None])[:, 0].exp()
        elif self.config.criterion == "margin":
            largest = log_p.topk(2, dim=-1).values.exp()
            confidence = largest[:, 0] - largest[:, 1]
        else:
            confidence = (-entropy).exp()
        return confidence, entropy

    def _kept(self, order_by, confidence, entropy, rows):
        """Which candidates [n] of the rows `rows` [n] the rule keeps."""
        order = order_by.argsort(descending=True, stable=True)
        order = order[rows[order].argsort(stable=True)]  # row by row, the most confident first
        sizes = torch.bincount(rows, minlength=len(self._due))
        rows = rows[order]
        rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[rows]  # within its row
        if self.config.rule == "count":
            passes = rank < self._due[rows]
        elif self.config.rule == "threshold":
            passes = confidence[order] > self.config.threshold
            passes |= (rank == 0) & (torch.bincount(rows[passes], minlength=len(sizes)) == 0)[rows]
        else:
            entropies = entropy.new_zeros(len(sizes), int(sizes.max()))
            entropies[rows, rank] = entropy[order]
            excess = entropies.cumsum(dim=1) - entropies.cummax(dim=1).values  # [batch, largest size]
            passes = (excess[rows, rank] <= self.config.entropy_bound) | (rank == 0)
        return torch.zeros_like(passes).index_copy(0, order, passes)


__all__ = ["ConfidenceUnmaskingScheduler"]
