"""What a text diffusion pipeline returns."""

from dataclasses import dataclass

import torch
from diffusers.utils import BaseOutput


@dataclass
class TextDiffusionPipelineOutput(BaseOutput):
    """
    Output of [`TextDiffusionPipeline`].

    Args:
        sequences (`list[torch.LongTensor]`):
            The whole canvas of each text, prompt and special tokens included, without padding: `[seq]` each.
        texts (`list[str]`, *optional*):
            The texts, special tokens left out, each ending at the first terminator that was generated; None for
            `output_type="seq"`.
    """

    sequences: list[torch.LongTensor]
    texts: list[str] | None = None
