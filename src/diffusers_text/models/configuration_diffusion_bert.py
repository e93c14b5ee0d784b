"""Configuration of the BERT denoiser."""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import BertConfig


@strict
class DiffusionBertConfig(BertConfig):
    r"""
    Configuration of [`DiffusionBertForMaskedDiffusion`]: everything of [`~transformers.BertConfig`] and the way in
    which the denoiser is told the diffusion time (DiffusionBERT, arXiv 2211.15029).

    Args:
        time_conditioning (`str`, defaults to `"none"`):
            - `"none"`: time-agnostic decoding, the plain BERT architecture.
            - `"layerwise"`: every layer adds an embedding of the time to its input.
            - `"prefix"`: one embedding of the time stands as an extra token between position 0 and the text, so the
              longest sequence is `max_position_embeddings - 1`.

    Example:

    ```python
    >>> from diffusers_text import DiffusionBertConfig, DiffusionBertForMaskedDiffusion

    >>> config = DiffusionBertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128)
    >>> model = DiffusionBertForMaskedDiffusion(config)
    >>> model.max_sequence_length
    512
    ```
    """

    model_type = "diffusion_bert"

    time_conditioning: Literal["none", "layerwise", "prefix"] = "none"

    def validate_bidirectional(self):
        """A denoiser sees the whole canvas: raises for a decoder. `strict` runs every `validate_` method."""
        if self.is_decoder or self.add_cross_attention:
            raise ValueError(
                "`is_decoder` and `add_cross_attention` must be False: a denoiser attends in both directions."
            )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        # A BERT checkpoint is a time-agnostic denoiser as it stands, so reading one is no type mismatch to warn about.
        if config_dict.get("model_type") == BertConfig.model_type:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, kwargs


__all__ = ["DiffusionBertConfig"]
