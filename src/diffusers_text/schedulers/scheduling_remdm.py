"""ReMDM: ancestral sampling that takes some revealed tokens back, so that later steps can mend earlier ones."""

from collections.abc import Iterable

import torch
from diffusers.configuration_utils import register_to_config

from .sampling import check_same_shape, draw_uniforms, is_number
from .scheduling_absorbing_state import AbsorbingStateScheduler, AbsorbingStateSchedulerOutput

STRATEGIES = ["cap", "rescale", "confidence", "loop"]


class ReMDMScheduler(AbsorbingStateScheduler):
    r"""
    Remasking discrete diffusion (ReMDM, arXiv 2503.00307): reverse processes that keep the marginals of masked
    diffusion but take tokens back.

    In the step from `t` to `s`, with `g = 1 - alpha` the probability of being masked, a revealed token is masked again
    with probability `sigma`, and a masked position takes token `k` with probability

        p_k (g_k(t) - g_k(s) + sigma_k (1 - g_k(t))) / g_k(t),    0 <= sigma_k <= sigma_max = g_k(s) / (1 - g_k(t)), 1

    so that after the step it is masked with probability g_k(s), whatever sigma is, unless sigma depends on what is
    masked and what is not, as that of `confidence` does. The strategies:

        cap          sigma = min(eta, sigma_max)
        rescale      sigma = eta sigma_max
        confidence   sigma = sigma_max softmax(-psi) over the row's revealed tokens, psi the model's probability of the
                     token when it was drawn; 0 for masked positions
        loop         no remasking until `t_on`, where alpha has reached `alpha_on`; then alpha stays there and
                     sigma = min(eta, sigma_max) until `t_off`; then the rest is revealed without remasking

    Deviations from the paper: `g` and `sigma` may depend on the token (the spindle), of a revealed position on the one
    it holds, of a masked one on the one that is drawn; for schedules that treat all tokens alike this is the paper's.
    With `spindle_mean="sentence"` g changes with the row, and the marginals are kept only approximately. `confidence`
    weighs sigma_max, as the released code does, where the paper allows any sigma; `eta` has no part in it, and psi is
    taken before temperature, top-k and top-p.

    Revealed tokens are taken back, prompts are not. Steps in which a row reveals nothing cost no forward pass. A model
    that is told the time wants the one that `next_positions` gives: in the strategy `loop` less is masked than at the
    `timesteps`.

    Args:
        strategy (`str`, defaults to `"cap"`): `"cap"`, `"rescale"`, `"confidence"` or `"loop"`.
        eta (`float`, defaults to 0.02):
            Strength of the remasking in [0, 1], of the strategies but `confidence`; 0 is ancestral sampling.
        t_on (`float`, defaults to 0.55), t_off (`float`, defaults to 0.05), alpha_on (`float`, defaults to 0.9):
            Times, 0 < t_off < t_on < 1, and share of revealed tokens of the strategy `loop`.
        mask_token_id, vocab_size, suppressed_token_ids, schedule, power, sigma_min, sigma_max, spindle_lambda,
        spindle_information, spindle_mean, token_counts, corpus, tilt, gen_length, temperature, top_k, top_p:
            As in [`AbsorbingStateScheduler`].

    Example:

    ```python
    >>> from diffusers_text import AbsorbingStateScheduler, ReMDMScheduler

    >>> scheduler = AbsorbingStateScheduler(mask_token_id=4)
    >>> ReMDMScheduler.from_config(scheduler.config, strategy="rescale", eta=0.1).config.eta
    0.1
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
        strategy: str = "cap",
        eta: float = 0.02,
        t_on: float = 0.55,
        t_off: float = 0.05,
        alpha_on: float = 0.9,
    ):
        if strategy not in STRATEGIES:
            raise ValueError(f"`strategy` must be one of {STRATEGIES}, got {strategy!r}.")
        for name, value in (("eta", eta), ("t_on", t_on), ("t_off", t_off), ("alpha_on", alpha_on)):
            if not is_number(value) or not 0 <= value <= 1 or (name != "eta" and value in (0, 1)):
                allowed = "[0, 1]" if name == "eta" else "(0, 1)"
                raise ValueError(f"`{name}` must be a number in {allowed}, got {value!r}.")
        if not t_off < t_on:
            raise ValueError(f"t_off < t_on must hold, got {t_off!r} and {t_on!r}.")
        self._prepare()

    def set_timesteps(self, num_inference_steps: int | None = None, device: torch.device | str | None = None):
        r"""
        Starts a new reverse process.

        Args:
            num_inference_steps (`int`): number of steps T from time 1 to 0; remasking has no limit of continuous time.
            device (`torch.device`, *optional*): where `timesteps` lie.
        """
        if num_inference_steps is None:
            raise ValueError(
                "`num_inference_steps` must be an integer >= 1, got None: remasking needs a number of steps."
            )
        super().set_timesteps(num_inference_steps, device)

    def _begin(self, num_inference_steps, device):
        super()._begin(num_inference_steps, device)
        # All of the plan lies on the CPU.
        self._owned = None  # [batch, seq], positions that this process reveals and may mask again
        self._proposed = None  # [batch, seq], which the next step reveals, if thinning agrees
        self._steps = None  # [batch], steps that each row has behind it
        self._psi = None  # [batch, seq], probability with which each revealed token was drawn
        if num_inference_steps is None:
            return
        timesteps = torch.arange(num_inference_steps, -1, -1, dtype=torch.float64) / num_inference_steps
        self._noise_times = self._held_back(timesteps)  # [T + 1], at which g is taken
        self._remasks = torch.ones(num_inference_steps, dtype=torch.bool)  # [T]
        if self.config.strategy == "loop":
            self._remasks = (timesteps[:-1] > self.config.t_off) & (timesteps[:-1] <= self.config.t_on)
        # No other token is revealed with a larger probability: g(s) / g(t) and g(t) rise with h.
        self._largest_reveal = self._reveal_probability(torch.arange(num_inference_steps), self._min_offset)  # [T]

    def _held_back(self, timesteps):
        """The times at which g is taken: `timesteps`, but for the strategy `loop`, where g rests for a while."""
        config = self.config
        if config.strategy != "loop":
            return timesteps
        one = torch.ones(1, dtype=torch.float64)
        held = self.noise.time_of(one - config.alpha_on, one, offset=0.0)  # g = 1 - alpha_on
        before = held + (timesteps - config.t_on) / (1 - config.t_on) * (1 - held)
        after = held * timesteps / config.t_off
        return torch.where(timesteps > config.t_on, before, after.minimum(held))

    def _remask_limit(self, steps, offsets):
        """sigma_max of tokens with `offsets` in `steps`."""
        g_t, g_s = (self.noise.g(self._noise_times[i], offsets) for i in (steps, steps + 1))
        return (g_s / (1 - g_t).clamp_min(1e-300)).clamp(max=1.0)  # 0 in the last step, whatever g_t is

    def _sigma(self, steps, offsets):
        """sigma of tokens with `offsets` in `steps`, but for the weights of the strategy `confidence`."""
        limit = self._remask_limit(steps, offsets)
        if self.config.strategy in ("cap", "loop"):
            limit = limit.clamp(max=self.config.eta)
        elif self.config.strategy == "rescale":
            limit = limit * self.config.eta
        return limit * self._remasks[steps]

    def _reveal_probability(self, steps, offsets):
        """The probability that a masked position takes the token with `offsets` that was drawn for it, in `steps`."""
        g_t, g_s = (self.noise.g(self._noise_times[i], offsets) for i in (steps, steps + 1))
        sigma = 0.0 if self.config.strategy == "confidence" else self._sigma(steps, offsets)
        return (g_t - g_s + sigma * (1 - g_t)) / g_t

    def next_positions(
        self,
        sample: torch.LongTensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        active: torch.BoolTensor | None = None,
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        r"""
        Where the next step that reveals something needs the denoiser, and each row's time. Arguments and result as in
        [`AbsorbingStateScheduler.next_positions`].
        """
        masked = self._masked(sample, active)
        self._check_steps()
        if self._owned is None:
            self._start(masked)
            self._advance(sample.cpu().clone(), generator)
        check_same_shape(masked, self._owned)
        self._proposed &= masked
        overdue = masked.any(dim=1) & ~self._proposed.any(dim=1)
        while overdue.any():  # the caller filled what was proposed: a later step, without remasking until then
            self._steps[overdue] = (self._steps[overdue] + 1).clamp(max=self.num_inference_steps - 1)
            self._propose(masked & overdue[:, None], generator)
            overdue &= ~self._proposed.any(dim=1)
        due = self._proposed.any(dim=1)
        self._steps[~due] = self.num_inference_steps  # a row that the caller filled is finished
        row_times = self._noise_times[self._steps] * due
        self._asked = self._proposed
        return self._proposed.flatten().nonzero().flatten(), row_times

    def _check_steps(self):
        if self.num_inference_steps is None:
            raise ValueError("`num_inference_steps` is not known yet: call `set_timesteps`.")

    def _start(self, masked):
        self._owned, self._proposed = masked, torch.zeros_like(masked)
        self._steps = torch.zeros(len(masked), dtype=torch.long)
        self._psi = torch.zeros(masked.shape, dtype=torch.float64)

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
        Reveals and remasks tokens, up to the next step that reveals something. Arguments, result and errors as in
        [`AbsorbingStateScheduler.step`], but that with `positions` the time is the plan's, whatever `timestep` says.
        """
        row_times = self._row_times(timestep, sample)
        self._check_steps()
        planned = positions is not None
        positions, asked_logits = self._asked_for(positions, logits, sample)
        if planned:
            playing = self._proposed.any(dim=1)
        else:
            masked = self._masked(sample, None)
            if self._owned is None:
                self._start(masked)
            check_same_shape(masked, self._owned)
            self._steps[:] = self._step_of(row_times)
            playing = torch.ones(len(sample), dtype=torch.bool)
        rows = positions // sample.shape[1]
        steps = self._steps[rows]
        uniforms = self._row_uniforms(rows, len(sample), 2, generator)
        context = sample.cpu()[rows] if self.noise.needs_context else None
        shaping = self._shaping(temperature, top_k, top_p)
        times = self._noise_times[steps]
        by_psi = self.config.strategy == "confidence"
        scores = [_probability] if by_psi else []
        tokens, *psi = self._draw(asked_logits, uniforms[:, 0], shaping, times, context, *scores)

        offsets = self.noise.token_offsets(tokens[:, None], context)
        chance = self._reveal_probability(steps, None if offsets is None else offsets[:, 0])
        if planned:
            chance = chance / self._largest_reveal[steps]
        canvas = sample.cpu().clone()
        remasked = self._draw_remasked(canvas, playing, generator)
        canvas.view(-1)[positions] = tokens.where(uniforms[:, 1] < chance, self.mask_token_id)
        canvas[remasked] = self.mask_token_id
        if by_psi:
            self._psi.view(-1)[positions] = psi[0]
        self._steps[playing] += 1
        self._proposed[:] = False
        self._asked = None
        if planned:
            self._advance(canvas, generator)
        return self._output(canvas.to(sample.device), sample, positions, tokens, logits, return_dict)

    def _step_of(self, times):
        """Which steps begin at `times` [batch], elements of `timesteps`."""
        s = self._previous_times(times)
        return (self.num_inference_steps * (1 - s)).round().long() - 1

    def _advance(self, canvas, generator):
        """Plays rows of `canvas` [batch, seq] up to a step that reveals something, or to the end; remasks in place."""
        while True:
            waiting = (self._steps < self.num_inference_steps) & ~self._proposed.any(dim=1)
            if not waiting.any():
                return
            self._propose((canvas == self.mask_token_id) & self._owned & waiting[:, None], generator)
            idle = waiting & ~self._proposed.any(dim=1)
            canvas[self._draw_remasked(canvas, idle, generator)] = self.mask_token_id
            self._steps[idle] += 1

    def _propose(self, masked, generator):
        """Draws which of the positions `masked` [batch, seq] the step of their row may reveal: in the last one all."""
        uniforms = draw_uniforms(masked.sum(dim=1).tolist(), generator, "cpu")
        self._proposed[masked] = uniforms < self._largest_reveal[self._steps[masked.nonzero()[:, 0]]]

    def _draw_remasked(self, canvas, playing, generator):
        """Which revealed positions [batch, seq] of the rows `playing` [batch] are masked again in their step."""
        remasked = (canvas != self.mask_token_id) & self._owned & playing[:, None]
        row, column = remasked.nonzero(as_tuple=True)
        uniforms = draw_uniforms(remasked.sum(dim=1).tolist(), generator, "cpu")
        context = canvas[row] if self.noise.needs_context else None
        offsets = self.noise.token_offsets(canvas[row, column][:, None], context)
        sigma = self._sigma(self._steps[row], None if offsets is None else offsets[:, 0])
        if self.config.strategy == "confidence":
            weights = (-self._psi).masked_fill(~remasked, -torch.inf).softmax(dim=1)  # NaN in rows without tokens
            sigma = sigma * weights[row, column]
        remasked[row, column] = uniforms < sigma
        return remasked


def _probability(log_p, tokens):
    """The probability [m] of `tokens` [m] under unnormalised log p [m, vocab], as the only entry of a tuple."""
    return (log_p.softmax(dim=-1).gather(-1, tokens[:, None])[:, 0],)


__all__ = ["ReMDMScheduler"]
