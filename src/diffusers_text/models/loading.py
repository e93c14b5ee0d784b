"""Denoisers from checkpoints of any encoder."""

from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from .configuration_diffusion_bert import DiffusionBertConfig
from .modeling_diffusion_bert import DiffusionBertForMaskedDiffusion


def load_denoiser(
    pretrained_model_name_or_path: str, time_conditioning: str | None = None, from_scratch: bool = False, **kwargs
) -> PreTrainedModel:
    r"""
    A denoiser from any encoder's checkpoint: [`DiffusionBertForMaskedDiffusion`] for BERT, and what
    `AutoModelForMaskedLM` says for others.

    Args:
        pretrained_model_name_or_path (`str`): folder or Hub id.
        time_conditioning (`str`, *optional*):
            `"none"`, `"layerwise"` or `"prefix"`, see [`DiffusionBertConfig`]; the latter two for BERT only. By
            default the checkpoint's own.
        from_scratch (`bool`, defaults to `False`): random weights for the checkpoint's config.
        kwargs: as in [`~transformers.PreTrainedModel.from_pretrained`], values for the config among them.

    Raises:
        ValueError: time conditioning that the architecture does not have, or that is not the checkpoint's own.

    Example:

    ```python
    >>> from diffusers_text import load_denoiser

    >>> model.save_pretrained("outputs/denoiser")
    >>> type(load_denoiser("outputs/denoiser")).__name__
    'DiffusionBertForMaskedDiffusion'
    ```
    """
    config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
    if config.model_type not in ("bert", DiffusionBertConfig.model_type):
        if time_conditioning not in (None, "none"):
            raise ValueError(f"`time_conditioning={time_conditioning!r}` is for BERT, not for a {config.model_type}.")
        if from_scratch:
            return AutoModelForMaskedLM.from_config(config)
        return AutoModelForMaskedLM.from_pretrained(pretrained_model_name_or_path, **kwargs)
    config = DiffusionBertConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
    if time_conditioning is None:
        time_conditioning = config.time_conditioning
    elif config.time_conditioning not in ("none", time_conditioning):
        raise ValueError(
            f"`time_conditioning` is {time_conditioning!r}, but the checkpoint was trained with"
            f" {config.time_conditioning!r}."
        )
    if from_scratch:
        config.time_conditioning = time_conditioning
        return AutoModelForMaskedLM.from_config(config)
    return DiffusionBertForMaskedDiffusion.from_pretrained(
        pretrained_model_name_or_path, time_conditioning=time_conditioning, **kwargs
    )


__all__ = ["load_denoiser"]
