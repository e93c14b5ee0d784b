"""What a text diffusion pipeline returns."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers.utils import BaseOutput


class TextDiffusionTrajectory(NamedTuple):
    """
    How a text came about: one entry for each change of a position, in order.

    Args:
        steps (`torch.LongTensor` of shape `[m]`): the forward pass, counted from 0, after which it happened.
        positions (`torch.LongTensor` of shape `[m]`): where, an index into the text's `sequences`.
        token_ids (`torch.LongTensor` of shape `[m]`):
            What was written; the mask token where a strategy takes a token back.
        times (`torch.DoubleTensor` of shape `[m]`):
            The diffusion time of the step in (0, 1], from 1 on in each block; 0 for what a callback wrote into a row
            that had nothing left to do.
    """

    steps: torch.LongTensor
    positions: torch.LongTensor
    token_ids: torch.LongTensor
    times: torch.Tensor


@dataclass
class TextDiffusionPipelineOutput(BaseOutput):
    """
    Output of [`TextDiffusionPipeline`].

    Args:
        sequences (`list[torch.LongTensor]`):
            The whole canvas of each text, prompt and special tokens included, without padding: `[seq]` each. With
            `block_length` it ends with the first terminator that was generated.
        texts (`list[str]`, *optional*):
            The texts, special tokens left out, each ending at the first terminator that was generated; None for
            `output_type="seq"`.
        trajectory (`list[TextDiffusionTrajectory]`, *optional*):
            How each text came about, with `return_trajectory=True`.
    """

    sequences: list[torch.LongTensor]
    texts: list[str] | None = None
    trajectory: list[TextDiffusionTrajectory] | None = None
