"""What the model says of a canvas: logits at asked positions, a few rows at a time, guided or not."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..models.sparse_head import HiddenStateCache, computes_all_logits, conditions_on_time, logits_at

# Elements of the logits that are held at once; the positions of one text stay together whatever they take.
MAX_ELEMENTS = {"cpu": 2**23, "other": 2**27}


@dataclass
class Predictor:
    r"""
    Logits of the canvases of one reverse process, which lie on the CPU.

    Args:
        model ([`~transformers.PreTrainedModel`]): the denoiser, on `device`.
        device (`torch.device`): where the logits are wanted.
        attention_mask (`torch.LongTensor` of shape `[batch, seq]`): 0 for padding.
        token_type_ids (`torch.LongTensor` of shape `[batch, seq]`, *optional*): segments.
        given (`torch.BoolTensor` of shape `[batch, seq]`): the prompt's tokens.
        mask_token_id (`int`): what stands in their place in the other half of guidance.
        guidance_scale (`float`): 1 for none.
        cache ([`HiddenStateCache`], *optional*): for a time-agnostic model whose rows may be asked for twice.
    """

    model: PreTrainedModel
    device: torch.device
    attention_mask: torch.LongTensor
    token_type_ids: torch.LongTensor | None
    given: torch.BoolTensor
    mask_token_id: int
    guidance_scale: float
    cache: HiddenStateCache | None

    def __call__(
        self, sample: torch.LongTensor, positions: torch.LongTensor, times: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """
        Logits `[m, vocab]` at consecutive parts of the sorted flat `positions` [n] of `sample` [batch, seq], whose
        rows stand at `times` [batch]; so few at a time that they are never held for a large batch. Rows without
        positions are not run.
        """
        guided, size = self.guidance_scale != 1, sample.numel()
        inputs = {"attention_mask": self.attention_mask, "token_type_ids": self.token_type_ids}
        if self.attention_mask.all():  # without padding the model is spared the mask
            del inputs["attention_mask"]
        inputs = {name: value for name, value in inputs.items() if value is not None}
        if guided:  # the same canvas once more, without the prompt
            sample = torch.cat([sample, sample.masked_fill(self.given, self.mask_token_id)])
            inputs, times = {name: value.repeat(2, 1) for name, value in inputs.items()}, times.repeat(2)
        max_positions = MAX_ELEMENTS["cpu" if self.device.type == "cpu" else "other"] // self.model.config.vocab_size
        for part in row_groups(positions, sample.shape[1], max_positions, computes_all_logits(self.model)):
            asked = torch.cat([positions[part], positions[part] + size]) if guided else positions[part]
            if self.cache is not None:
                logits = self.cache.logits_at(self.model, asked, sample, self.device, **inputs)
            else:
                logits = self._logits_at(asked, sample, times, inputs)
            if guided:
                with_prompt, without = logits.float().chunk(2)
                logits = without + self.guidance_scale * (with_prompt - without)
            yield part, logits

    def _logits_at(self, positions, sample, times, inputs):
        seq_len = sample.shape[1]
        rows, row_of_position = torch.unique(positions // seq_len, return_inverse=True)
        inputs = {"input_ids": sample[rows], **{name: value[rows] for name, value in inputs.items()}}
        if conditions_on_time(self.model):
            inputs["timesteps"] = times[rows].float()
        inputs = {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}
        positions = row_of_position * seq_len + positions % seq_len
        return logits_at(self.model, positions.to(self.device, non_blocking=True), **inputs)


def row_groups(
    positions: torch.LongTensor, seq_len: int, max_positions: int, whole_rows: bool = False
) -> Iterator[slice]:
    """
    Slices of sorted flat `positions` [n] that hold whole rows, and several only up to `max_positions`; with
    `whole_rows` a row counts with all of its positions, asked or not.
    """
    start = end = size = 0
    _, counts = torch.unique_consecutive(positions // seq_len, return_counts=True)
    for count in counts.tolist():
        cost = seq_len if whole_rows else count
        if end > start and size + cost > max_positions:
            yield slice(start, end)
            start, size = end, 0
        end, size = end + count, size + cost
    yield slice(start, end)
