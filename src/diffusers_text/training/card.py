"""The model card of a training run."""

from pathlib import Path

from huggingface_hub import ModelCard

from ..pipelines.model_card import create_model_card

# Arguments that say how a model came about, as transformers names them.
SHOWN_ARGUMENTS = [
    "objective",
    "mask_sampling",
    "max_length",
    "packing",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "seed",
    "ema_decay",
]

TEMPLATE = """
## Training

{steps} steps, {epochs:.2f} epochs. The weights are {weights}.

| argument | value |
|---|---|
{arguments}
"""


def create_training_card(trainer, license: str | None, datasets: str | list[str] | None) -> ModelCard:
    """
    The card of the pipeline that `trainer` has trained, with arguments, figures, the plot of the loss and texts.
    Arguments as in [`~pipelines.model_card.create_model_card`].
    """
    args, state = trainer.args, trainer.state
    values = {**args.to_dict(), "world_size": args.world_size}
    rows = [f"| {name} | {values[name]} |" for name in SHOWN_ARGUMENTS]
    weights = "those of the last step" if trainer.ema is None else f"a moving average, decay {args.ema_decay}"
    text = TEMPLATE.format(
        steps=state.global_step, epochs=state.epoch or 0, weights=weights, arguments="\n".join(rows)
    )
    last = {name: value for entry in state.log_history for name, value in entry.items()}
    for name in (name for name in last if name.startswith("eval_") and name.endswith("_standard_error")):
        prefix = name.removesuffix("bound_standard_error")  # "eval_", or "eval_" and a dataset's name
        which = prefix.removeprefix("eval_").removesuffix("_") or "the held-out data"
        text += (
            f"\nBound on {which}, in nats per token: {last[prefix + 'bound']:.3f}, with a standard error of the noise"
            f" of {last[name]:.3f}; masked tokens predicted right: {last[prefix + 'masked_accuracy']:.1%}.\n"
        )
    if Path(args.output_dir, "loss.png").exists():
        text += "\n![loss](loss.png)\n"
    if trainer.samples:
        text += "\n## Samples\n\n" + "\n".join(f"- {sample}" for sample in trainer.samples) + "\n"
    repo_id = trainer.hub_model_id or Path(args.output_dir).resolve().name
    return create_model_card(trainer.pipeline, repo_id, license, datasets, text)
