"""Noise of training steps."""

from ..noising import MASKS, TIMES, NoisyRows, draw_noise, keyed_generator


def training_noise(scheduler, sample, maskable, args, step: int, rows: list[int], total: int) -> NoisyRows:
    r"""
    Noise of a training step, keyed by the seed, the step and the row.

    Args:
        scheduler, sample, maskable: as in [`draw_noise`].
        args ([`TextDiffusionTrainingArguments`]): how to draw it.
        step (`int`): the optimizer step, to which all `total` rows of all processes and accumulated batches belong.
        rows (`list[int]` of length batch): the numbers of these rows among them.
    """
    by_count = args.mask_sampling == "count"
    discrete = args.objective == "discrete"
    uniforms = scheduler.sample_timesteps(total, generator=keyed_generator(TIMES, args.seed, step))
    generators = [keyed_generator(MASKS, args.seed, step, row) for row in rows]
    return draw_noise(
        scheduler,
        sample,
        maskable,
        uniforms[rows],
        generators,
        by_count,
        power=args.time_power,
        num_steps=args.num_diffusion_steps if discrete else None,
        time_epsilon=0.0 if by_count or discrete else args.time_epsilon,
    )
