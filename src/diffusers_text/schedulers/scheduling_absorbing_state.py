"""Absorbing-state (masked) diffusion: forward noising, rates, and the exact reverse process."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput

from .noise_schedules import MaskingNoise
from .sampling import (
    check_counts,
    check_finite,
    check_positive_int,
    check_same_shape,
    check_sample,
    check_shaping,
    check_times,
    draw_tokens,
    draw_uniforms,
    is_number,
    precise_dtype,
    shape_logits,
    split_logits,
    write_tokens,
)


@dataclass
class AbsorbingStateSchedulerOutput(BaseOutput):
    """
    Output of [`AbsorbingStateScheduler.step`].

    Args:
        prev_sample (`torch.LongTensor` of shape `[batch, seq]`):
            The canvas at the next, cleaner time.
        pred_original_sample (`torch.LongTensor` of shape `[batch, seq]`):
            The canvas with every token that was drawn, revealed in this step or not.
        pred_logits (`torch.Tensor`, *optional*):
            The denoiser's logits as they were passed; None where they came in pieces.
    """

    prev_sample: torch.LongTensor
    pred_original_sample: torch.LongTensor
    pred_logits: torch.Tensor | None = None


class AbsorbingStateScheduler(SchedulerMixin, ConfigMixin):
    r"""
    Masked diffusion with the schedules of MDLM (arXiv 2406.07524) and DiffusionBERT's spindle (arXiv 2211.15029).

    A token `x` is masked at time `t` in (0, 1] with probability `g_x(t)`; `t = 1` is fully masked. A masked position
    of the reverse process takes token `k` on the way from `t` to `s < t` with probability `p_k u_k`, `u_k = 1 - g_k(s)
    / g_k(t)`, where `p = softmax(logits + log g(t))`: Bayes' rule gives the prediction the factor `g_k(t)` (the tilt),
    which is constant, and so nothing, unless the schedule depends on the token.

    Deviations from DiffusionBERT: its `h` is clamped so that g is monotone, its mean is taken over the corpus by
    default, its reverse step uses the token-dependent rates, and the tilt is on by default.

    Args:
        mask_token_id (`int`, *optional*):
            Id of the mask token. [`TextDiffusionPipeline`] fills it in from its tokenizer.
        vocab_size (`int`, *optional*):
            Size of the tokenizer's vocabulary; ids beyond it are never sampled. Filled in likewise.
        suppressed_token_ids (`list[int]`, *optional*):
            Ids that are never sampled beside `mask_token_id`. Filled in likewise: special tokens but the terminator.
        schedule (`str`, defaults to `"linear"`):
            `"linear"` (or by its MDLM name `"loglinear"`), `"cosine"`, `"polynomial"`, `"geometric"`, `"spindle"`.
        power (`float`, defaults to 2.0): exponent of the polynomial schedule.
        sigma_min, sigma_max (`float`, defaults to 1e-5 and 20): ends of the geometric schedule.
        spindle_lambda (`float`, defaults to 0.3): strength of the spindle in [0, 1]; 0 is linear.
        spindle_information (`str`, defaults to `"surprisal"`):
            `"surprisal"` for the paper's `h`, `"log_count"` for that of its released code.
        spindle_mean (`str`, defaults to `"corpus"`):
            Mean information over the `"corpus"`, or as in the paper over the `"sentence"`: the row without
            `suppressed_token_ids`, of which the reverse process gives masked tokens the corpus mean.
        token_counts (`list[int]` of length `vocab_size`, *optional*):
            Occurrences of each token in the training corpus, from [`count_tokens`]; the spindle needs them.
        corpus (`str`, *optional*): what `token_counts` was counted on, for the record.
        tilt (`bool`, defaults to `True`): whether the prediction gets the factor `g_k(t)`; the paper has none.
        gen_length (`int`, defaults to 64): text tokens that a pipeline generates by default.
        temperature (`float`, defaults to 1.0), top_k (`int`, *optional*), top_p (`float`, *optional*):
            Default shaping of `p` when sampling, as in [`~transformers.GenerationConfig`]; temperature 0 is argmax.

    Example:

    ```python
    >>> import torch
    >>> from diffusers_text import AbsorbingStateScheduler

    >>> scheduler = AbsorbingStateScheduler(mask_token_id=4, schedule="cosine")
    >>> generator = torch.Generator().manual_seed(0)
    >>> times = scheduler.sample_timesteps(2, generator=generator)
    >>> noisy = scheduler.add_noise(torch.tensor([[0, 1, 2], [3, 2, 1]]), times, generator=generator)

    >>> sample = torch.full((1, 3), 4)
    >>> scheduler.set_timesteps(8)
    >>> for t in scheduler.timesteps:
    ...     logits = torch.zeros(1, 3, 5)  # a model's logits of `sample`
    ...     sample = scheduler.step(logits, t, sample, generator=generator).prev_sample
    >>> bool((sample == 4).any())
    False
    ```
    """

    order = 1
    _compatibles = ["AbsorbingStateScheduler", "ConfidenceUnmaskingScheduler", "ReMDMScheduler"]

    @classmethod
    def _get_compatibles(cls):
        # In diffusers these are names of its own. `from_config` keeps settings that only the others know.
        library = import_module(__name__.split(".")[0])
        return [getattr(library, name) for name in cls._compatibles]

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
    ):
        self._prepare()

    def _prepare(self):
        """What follows from the config: subclasses share it, after they have registered theirs."""
        self._check_config()
        self.noise = MaskingNoise(self.config)
        self._suppressed_ids = None
        self._min_offset = None
        if self.noise.token_dependent:
            self._min_offset = self.noise.smallest_offset(self._suppressed(len(self.config.token_counts), "cpu"))
        self._begin(None, None)

    def _check_config(self):
        config = self.config
        if config.mask_token_id is not None and (type(config.mask_token_id) is not int or config.mask_token_id < 0):
            raise ValueError(f"`mask_token_id` must be an integer >= 0, got {config.mask_token_id!r}.")
        if config.vocab_size is not None:
            check_positive_int("vocab_size", config.vocab_size)
            if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
                raise ValueError(
                    f"`mask_token_id` {config.mask_token_id} is not in the vocabulary of {config.vocab_size}."
                )
        suppressed = config.suppressed_token_ids
        if suppressed is not None and not (
            isinstance(suppressed, list) and all(type(i) is int and i >= 0 for i in suppressed)
        ):
            raise ValueError(f"`suppressed_token_ids` must be a list of integers >= 0, got {suppressed!r}.")
        check_positive_int("gen_length", config.gen_length)
        check_shaping(config.temperature, config.top_k, config.top_p)

    def __repr__(self):
        shown = {name: self.config[name] for name in self.config if name in self._get_init_keys(type(self))}
        if shown["token_counts"] is not None:
            shown["token_counts"] = f"<{len(shown['token_counts'])} counts>"
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    # --- Forward process ---

    @property
    def mask_token_id(self) -> int:
        """Id of the mask token; an error when the config has none."""
        if self.config.mask_token_id is None:
            raise ValueError("`mask_token_id` is None: build the scheduler with `**token_settings(tokenizer)`.")
        return self.config.mask_token_id

    def mask_probability(self, timesteps: torch.Tensor, input_ids: torch.LongTensor | None = None) -> torch.Tensor:
        r"""
        The probability `g` that a token is masked.

        Args:
            timesteps (`torch.Tensor` of shape `[batch]`): times in [0, 1].
            input_ids (`torch.LongTensor` of shape `[batch, seq]`, *optional*):
                Clean tokens, for a token-dependent schedule.

        Returns:
            `torch.Tensor` of shape `[batch, 1]`, or `[batch, seq]` for a token-dependent schedule.
        """
        return self.noise.g(timesteps[:, None], self.noise.token_offsets(input_ids, input_ids))

    def unmasking_rate(self, timesteps: torch.Tensor, input_ids: torch.LongTensor | None = None) -> torch.Tensor:
        """
        The rate `r = g'(t) / g(t)` at which masked tokens are revealed; arguments and shape of [`mask_probability`].
        """
        return self.noise.rate(timesteps[:, None], self.noise.token_offsets(input_ids, input_ids))

    def sample_timesteps(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        num_steps: int | None = None,
        time_epsilon: float = 0.0,
    ) -> torch.Tensor:
        r"""
        Training times, each uniform on (0, 1] and together stratified: one random shift, and a random permutation of
        the strata over rows, so that a row's time does not depend on its place (the low-discrepancy sampler of MDLM,
        arXiv 2406.07524).

        Args:
            batch_size (`int`): number of times.
            generator (`torch.Generator`, *optional*): source of randomness.
            device (`torch.device`, *optional*): of the result; the generator's by default.
            num_steps (`int`, *optional*): round up to the grid `i / num_steps` of the discrete-time bound.
            time_epsilon (`float`, defaults to 0): smallest time, a cut for training only; a reported bound has none.

        Returns:
            `torch.FloatTensor` of shape `[batch_size]`.
        """
        check_positive_int("batch_size", batch_size)
        if not is_number(time_epsilon) or not 0 <= time_epsilon < 1:
            raise ValueError(f"`time_epsilon` must lie in [0, 1), got {time_epsilon!r}.")
        if num_steps is not None:
            check_positive_int("num_steps", num_steps)
            if time_epsilon > 0:
                raise ValueError("`time_epsilon` would push times off the grid of `num_steps`: pass one of them.")
        source = "cpu" if generator is None else generator.device
        strata = torch.randperm(batch_size, generator=generator, device=source)
        shift = torch.rand(1, generator=generator, device=source)
        times = 1 - (strata + shift.to(precise_dtype(source))) / batch_size
        if num_steps is not None:
            times = (times * num_steps).ceil() / num_steps
        times = time_epsilon + (1 - time_epsilon) * times
        return times.float().to(device or source)

    def add_noise(
        self,
        sample: torch.LongTensor,
        timesteps: torch.Tensor,
        *,
        maskable: torch.BoolTensor | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        antithetic: bool = False,
    ) -> torch.LongTensor:
        r"""
        Draws from the forward process `q(z_t | x)`: each maskable token is masked with probability `g_x(t)`.

        Args:
            sample (`torch.LongTensor` of shape `[batch, seq]`): clean tokens.
            timesteps (`torch.Tensor` of shape `[batch]`): times in [0, 1].
            maskable (`torch.BoolTensor` of shape `[batch, seq]`, *optional*):
                Positions that may be masked, all by default; see [`maskable_tokens`].
            generator (`torch.Generator` or one a row, *optional*): source of randomness.
            antithetic (`bool`, defaults to `False`): use `1 - u` in place of the generator's uniform numbers u.

        Returns:
            `torch.LongTensor` of shape `[batch, seq]`.
        """
        check_sample(sample)
        check_times(timesteps, len(sample))
        uniforms = draw_uniforms([sample.shape[1]] * len(sample), generator, sample.device, antithetic).view(
            sample.shape
        )
        masked = uniforms < self.mask_probability(timesteps.to(uniforms), sample)
        if maskable is not None:
            masked = masked & maskable
        return sample.masked_fill(masked, self.mask_token_id)

    def add_nonempty_noise(
        self,
        sample: torch.LongTensor,
        timesteps: torch.Tensor,
        *,
        maskable: torch.BoolTensor | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        antithetic: bool = False,
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        r"""
        Draws from the forward process given that it masks something, and how likely that is. A bound's estimate from
        such a draw, times that probability, has the expectation of one from [`add_noise`]; its weights do not grow
        without limit at small times.

        Arguments as in [`add_noise`], with times in (0, 1].

        Returns:
            `torch.LongTensor` of shape `[batch, seq]` and probabilities, `torch.FloatTensor` of shape `[batch]`: 0 for
            a row without maskable tokens.
        """
        check_sample(sample)
        check_times(timesteps, len(sample), above_zero=True)
        length = sample.shape[1]
        uniforms = draw_uniforms([1 + length] * len(sample), generator, sample.device, antithetic).view(-1, 1 + length)
        probability = self.mask_probability(timesteps.to(uniforms), sample).expand(sample.shape)
        if maskable is not None:
            probability = probability * maskable
        # The first masked position by inverting its distribution, all after it as ever.
        reached = -torch.expm1(torch.log1p(-probability).cumsum(dim=1))  # [batch, seq], masked by then
        nonempty = reached[:, -1:]
        first = (reached < (1 - uniforms[:, :1]) * nonempty).sum(dim=1, keepdim=True)
        places = torch.arange(length, device=sample.device)
        masked = ((places == first) & (nonempty > 0)) | ((places > first) & (uniforms[:, 1:] < probability))
        return sample.masked_fill(masked, self.mask_token_id), nonempty.squeeze(1).float()

    def add_noise_by_count(
        self,
        sample: torch.LongTensor,
        counts: torch.LongTensor,
        *,
        maskable: torch.BoolTensor | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        antithetic: bool = False,
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        r"""
        Draws from the forward process given how many tokens it has masked: `counts[i]` of row `i`'s maskable ones, all
        choices alike, and a time `t` with `g(t) ~ Beta(count, maskable - count + 1)`. With counts uniform on 1 to the
        number of maskable tokens, `g(t)` is uniform; see [`masked_count_bound`].

        Arguments as in [`add_noise`], and:

        Args:
            counts (`torch.LongTensor` of shape `[batch]`):
                Tokens to mask, from 1 to the row's maskable ones; 0 in a row without any.

        Returns:
            `torch.LongTensor` of shape `[batch, seq]` and times, `torch.FloatTensor` of shape `[batch]`.

        Raises:
            ValueError: a count out of range, or a schedule that depends on the token.
        """
        check_sample(sample)
        if self.noise.token_dependent:
            raise ValueError(
                f"The schedule {self.config.schedule!r} depends on the token: which tokens are masked does not follow"
                " from how many are. Use `add_noise`."
            )
        uniforms = draw_uniforms([sample.shape[1]] * len(sample), generator, sample.device, antithetic).view(
            sample.shape
        )
        if maskable is None:
            maskable = torch.ones_like(sample, dtype=torch.bool)
        check_counts(counts, maskable.sum(dim=1))
        # The count-th smallest of the uniforms is the level g(t) at which that many have just been masked.
        levels = uniforms.masked_fill(~maskable, torch.inf)
        level = levels.sort(dim=1).values.gather(1, (counts[:, None] - 1).clamp_min(0))  # [batch, 1]
        masked = (levels <= level) & maskable & (counts[:, None] > 0)
        level = level.squeeze(1).clamp(torch.finfo(torch.float32).tiny, 1)  # rows without maskable tokens have inf
        times = self.noise.time_of(level, torch.ones_like(level), None)
        return sample.masked_fill(masked, self.mask_token_id), times.float()

    # --- Reverse process ---

    def set_timesteps(self, num_inference_steps: int | None = None, device: torch.device | str | None = None):
        r"""
        Starts a new reverse process.

        Args:
            num_inference_steps (`int`, *optional*):
                Number of steps T from time 1 to 0; None for continuous time, T = infinity. `timesteps` are then None.
            device (`torch.device`, *optional*): where `timesteps` lie.
        """
        if num_inference_steps is not None:
            check_positive_int("num_inference_steps", num_inference_steps)
        self._begin(num_inference_steps, device)

    def _begin(self, num_inference_steps, device):
        self.timesteps = None
        if num_inference_steps is not None:
            steps = torch.arange(num_inference_steps, device=device, dtype=precise_dtype(device or "cpu"))
            self.timesteps = 1 - steps / num_inference_steps
        self.num_inference_steps = num_inference_steps
        # The plan lives on the CPU: [batch, seq] times at which masked positions are next proposed, 0 where nothing is
        # planned, and [batch] times up to which each row has been played. An event of a T-step process is recorded as
        # the time t at which its step begins.
        self._events = None
        self._now = None
        self._asked = None  # [batch, seq], what the last `next_positions` gave

    def next_positions(
        self,
        sample: torch.LongTensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        active: torch.BoolTensor | None = None,
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        r"""
        Where the reverse process next needs the denoiser, and at which time.

        Whether a position is revealed does not depend on the model when the schedule treats all tokens alike: it
        happens at the time tau with `g(tau) = U`, U uniform. A token-dependent schedule reveals by thinning: positions
        are proposed as if their token were the fastest one, and [`step`] accepts what was drawn with `u_k / u_max`.
        Each row jumps from one of its events to the next, so rows stand at different times. In continuous time this is
        the first-hitting sampler (arXiv 2409.02908).

        Args:
            sample (`torch.LongTensor` of shape `[batch, seq]`): the canvas.
            generator (`torch.Generator` or one a row, *optional*): source of randomness.
            active (`torch.BoolTensor` of shape `[batch, seq]`, *optional*):
                Where this process may reveal tokens, everywhere by default; other masked positions stay masked.

        Returns:
            Flat indices `[n]` over `batch * seq`, none when the canvas is finished, and on the CPU as well the time of
            each row, `[batch]`: at which its step begins, or in continuous time its event's; 0 for a finished row.
        """
        masked = self._masked(sample, active)
        if self._events is None:
            self._events = torch.zeros(masked.shape, dtype=torch.float64)
            self._now = torch.ones(len(masked), dtype=torch.float64)
        check_same_shape(masked, self._events)
        self._events[~masked] = 0
        unplanned = masked & (self._events == 0)
        if unplanned.any():
            self._events[unplanned] = self._draw_events(unplanned, generator)
        row_times = self._events.amax(dim=1) if masked.numel() else self._now * 0
        self._asked = (self._events == row_times[:, None]) & masked
        return self._asked.flatten().nonzero().flatten(), row_times

    def _masked(self, sample, active) -> torch.BoolTensor:
        """Which positions [batch, seq] the process may reveal, on the CPU."""
        check_sample(sample)
        masked = (sample == self.mask_token_id).cpu()
        return masked if active is None else masked & active.cpu()

    def _draw_events(self, unplanned, generator):
        """Times of the next proposals at `unplanned` positions [batch, seq], row-major, from each row's `_now`."""
        rows = unplanned.nonzero()[:, 0]
        now = self._now[rows]
        if self.num_inference_steps is not None:  # the last step once more, for what a caller masks after it
            now = now.clamp_min(1 / self.num_inference_steps)
        uniforms = 1 - draw_uniforms(unplanned.sum(dim=1).tolist(), generator, "cpu")  # in (0, 1]
        # No proposal in [tau, now) has probability g_min(tau) / g_min(now).
        tau = self.noise.time_of(uniforms * self.noise.g(now, self._min_offset), now, self._min_offset)
        if self.num_inference_steps is None:
            return tau
        steps = self.num_inference_steps
        return torch.minimum((tau * steps).floor() + 1, (now * steps).round()) / steps

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
        One step of the reverse process.

        Args:
            logits (`torch.Tensor` of shape `[n, vocab]`, or `[batch, seq, vocab]` without `positions`):
                The denoiser's logits for `sample`; with `positions` also an iterable of consecutive pieces `[m,
                vocab]`, of which one is held at a time.
            timestep (`torch.Tensor` of shape `[batch]` or scalar):
                The times that [`next_positions`] gave, or without `positions` an element of `timesteps`.
            sample (`torch.LongTensor` of shape `[batch, seq]`):
                The canvas at that time. It may lie on the CPU while the logits do not.
            positions (`torch.LongTensor` of shape `[n]`, *optional*): what [`next_positions`] gave.
            generator (`torch.Generator` or one a row, *optional*): source of randomness.
            temperature, top_k, top_p (*optional*):
                Shape `p` before it is decided which drawn tokens are revealed; None stands for the config's value.
            return_dict (`bool`, defaults to `True`): return an output class, or the tuple of its fields.

        Returns:
            [`AbsorbingStateSchedulerOutput`] or `tuple`.

        Raises:
            ValueError: shapes that do not fit, shaping out of range, a timestep off the grid, full logits in
                continuous time, or on the CPU logits that hold NaN or infinity.
        """
        times = self._row_times(timestep, sample)
        prev_times = self._previous_times(times)  # [batch], None in continuous time
        planned = positions is not None
        if not planned and self.num_inference_steps is None:
            raise ValueError("Continuous time (`set_timesteps(None)`) needs `positions`, from `next_positions`.")
        positions, asked_logits = self._asked_for(positions, logits, sample)

        rows = positions // sample.shape[1]
        certain = planned and not self.noise.token_dependent  # the plan already decided that these are revealed
        uniforms = self._row_uniforms(rows, len(sample), 1 if certain else 2, generator)  # [n, 1 or 2]
        context = sample.cpu()[rows] if self.noise.needs_context else None  # [n, seq]
        shaping = self._shaping(temperature, top_k, top_p)
        (tokens,) = self._draw(asked_logits, uniforms[:, 0], shaping, times[rows], context)
        revealed = tokens
        if not certain:
            prev = None if prev_times is None else prev_times[rows]
            chance = self._acceptance_probability(tokens, context, times[rows], prev, planned)
            revealed = tokens.where(uniforms[:, 1] < chance, self.mask_token_id)
        if planned:
            self._events[self._asked] = 0
            self._now = (times if prev_times is None else prev_times).where(times > 0, self._now)
            self._asked = None
        return self._output(write_tokens(sample, positions, revealed), sample, positions, tokens, logits, return_dict)

    def _row_times(self, timestep, sample):
        """`timestep` for each row of `sample` [batch, seq]: [batch]."""
        check_sample(sample)
        times = torch.as_tensor(timestep, dtype=torch.float64, device="cpu")
        if times.ndim > 1 or times.numel() not in (1, len(sample)):
            raise ValueError(f"`timestep` must be a scalar or have shape [{len(sample)}], got {list(times.shape)}.")
        return times.expand(len(sample))

    def _asked_for(self, positions, logits, sample):
        """
        Where something is drawn and the logits there: at `positions` if they are those of the plan, or at all masked
        positions of a loop that has logits of everything.
        """
        if positions is None:
            return self._all_masked(logits, sample)
        positions = positions.cpu()
        if self._asked is None or not torch.equal(positions, self._asked.flatten().nonzero().flatten()):
            raise ValueError("`positions` must be those of the last `next_positions`.")
        return positions, logits

    def _all_masked(self, logits, sample):
        """The masked positions [n] and their logits [n, vocab], for a loop that has logits of everything."""
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != sample.shape:
            given = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise ValueError(f"`logits` must have shape {[*sample.shape]} + [vocab], got {given}.")
        positions = (sample == self.mask_token_id).flatten().nonzero().flatten()
        return positions.cpu(), logits.flatten(0, 1)[positions]

    def _row_uniforms(self, rows, batch_size, numbers, generator):
        """`numbers` uniforms for each of the asked positions in `rows` [n], on the CPU: [n, numbers]."""
        counts = torch.bincount(rows, minlength=batch_size).tolist()
        return draw_uniforms([numbers * n for n in counts], generator, "cpu").view(-1, numbers)

    def _predictions(self, logits, num_rows, times=None, context=None):
        """
        Pieces of the unnormalised log p_k [m, vocab], with the slice of the `num_rows` rows that they are: suppressed
        ids at -inf, and tilted by log g_k(t) where `times` [num_rows] are given.
        """
        for part, piece in split_logits(logits, num_rows):
            suppressed = self._suppressed(piece.shape[-1], piece.device)
            log_p = piece.float().masked_fill(suppressed, -torch.inf)
            check_finite(log_p)
            if times is not None and self.noise.token_dependent and self.config.tilt:
                part_times = times[part].float()[:, None].to(piece.device, non_blocking=True)
                part_context = None if context is None else context[part].to(piece.device, non_blocking=True)
                offsets = self.noise.vocabulary_offsets(piece.shape[-1], part_context, piece.device).float()
                log_p += self.noise.g(part_times, offsets).log()
            yield part, log_p

    def _shaping(self, temperature, top_k, top_p):
        """What [`shape_logits`] takes: the config's values where an argument is None."""
        config = self.config
        temperature = config.temperature if temperature is None else temperature
        top_k, top_p = config.top_k if top_k is None else top_k, config.top_p if top_p is None else top_p
        check_shaping(temperature, top_k, top_p)
        return temperature, top_k, top_p

    def _draw(self, logits, uniforms, shaping, times=None, context=None, scores=lambda log_p, tokens: ()):
        """
        A token for each of the rows of `logits`, by `uniforms` [n], and what `scores(log_p [m, vocab], tokens [m])`
        gives for them before shaping, all `[n]` on the CPU. Waits once for the device of the logits.
        """
        drawn = []
        for part, log_p in self._predictions(logits, len(uniforms), times, context):
            tokens = draw_tokens(shape_logits(log_p, *shaping), uniforms[part])
            drawn.append(torch.stack([tokens.to(log_p), *scores(log_p, tokens)]))  # float32 holds ids up to 2^24
        if not drawn:
            raise ValueError("`logits` is empty: nothing is left to draw on a finished canvas.")
        tokens, *scores = torch.cat(drawn, dim=1).cpu().double()
        return tokens.long(), *scores

    def _output(self, canvas, sample, positions, tokens, logits, return_dict):
        """The next `canvas`, and `sample` with all of the drawn `tokens` [n] at `positions` [n]."""
        passed = logits if isinstance(logits, torch.Tensor) else None
        output = (canvas, write_tokens(sample, positions, tokens), passed)
        return AbsorbingStateSchedulerOutput(*output) if return_dict else output

    def _acceptance_probability(self, tokens, context, times, prev_times, planned):
        """The probability [n] with which drawn `tokens` are revealed: u_k, or of planned ones u_k / u_max."""

        def intensity(offsets):
            if prev_times is None:
                return self.noise.rate(times, offsets)
            return 1 - self.noise.stay_probability(times, prev_times, offsets)

        offsets = self.noise.token_offsets(tokens[:, None], context)
        drawn = intensity(None if offsets is None else offsets[:, 0])
        return drawn / intensity(self._min_offset) if planned else drawn

    def _previous_times(self, times):
        """The cleaner times `s` [batch] at which steps from `times` end; None in continuous time."""
        if self.num_inference_steps is None:
            return None
        index = times * self.num_inference_steps
        off_grid = (index - index.round()).abs() > 1e-3
        if off_grid.any() or (index.round() > self.num_inference_steps).any() or (index.round() < 0).any():
            raise ValueError(f"`timestep` must be one of `scheduler.timesteps`, got {times.tolist()}.")
        return (index.round() - 1).clamp_min(0) / self.num_inference_steps

    def _suppressed(self, vocab_size: int, device) -> torch.BoolTensor:
        """Which of `vocab_size` ids are never sampled."""
        if self._suppressed_ids is None or len(self._suppressed_ids) != vocab_size:
            suppressed = torch.zeros(vocab_size, dtype=torch.bool)
            suppressed[[i for i in self.config.suppressed_token_ids or [] if i < vocab_size]] = True
            if self.config.mask_token_id is not None and self.config.mask_token_id < vocab_size:
                suppressed[self.config.mask_token_id] = True
            if self.config.vocab_size is not None:
                suppressed[self.config.vocab_size :] = True
            self._suppressed_ids = suppressed
        self._suppressed_ids = self._suppressed_ids.to(device)  # stays there
        return self._suppressed_ids


__all__ = ["AbsorbingStateScheduler", "AbsorbingStateSchedulerOutput"]
