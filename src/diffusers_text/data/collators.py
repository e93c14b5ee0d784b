"""Batches out of training rows."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .special_tokens import maskable_tokens, terminator_id


@dataclass
class DataCollatorForTextDiffusion:
    r"""
    Pads rows to the longest of the batch and labels what is to be generated. Noise is drawn by the trainer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the tokenizer that made the rows.
        pad_to_multiple_of (`int`, *optional*): round lengths up, as tensor cores like it.
        fill_to (`int`, *optional*):
            Fill shorter rows up to this length with terminators that count as text, so that a model learns to end a
            text within a longer canvas (LLaDA, arXiv 2502.09992).

    A row holds `input_ids`, and where it has them `attention_mask`, `token_type_ids` and `prompt_length`, the number
    of tokens at its start that are given and not generated. A batch holds `input_ids` [batch, seq], `labels` [batch,
    seq] (the ids of maskable tokens that are not given, -100 elsewhere), `attention_mask` where there is padding, and
    `token_type_ids` and `copy_number` where the rows have them.

    Example:

    ```python
    >>> from diffusers_text import DataCollatorForTextDiffusion

    >>> collate = DataCollatorForTextDiffusion(tokenizer)
    >>> batch = collate([{"input_ids": [101, 2057, 102]}, {"input_ids": [101, 2057, 2057, 102], "prompt_length": 2}])
    >>> batch["labels"]
    tensor([[-100, 2057,  102, -100],
            [-100, -100, 2057,  102]])
    ```
    """

    tokenizer: PreTrainedTokenizerBase
    pad_to_multiple_of: int | None = None
    fill_to: int | None = None

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        rows = [without_padding(row) for row in rows]
        if self.fill_to is not None:
            rows = [filled(row, self.fill_to, terminator_id(self.tokenizer)) for row in rows]
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        width = int(lengths.max())
        if self.pad_to_multiple_of is not None:
            width = math.ceil(width / self.pad_to_multiple_of) * self.pad_to_multiple_of
        columns = torch.arange(width)
        inside = columns < lengths[:, None]  # [batch, seq]
        batch = {"input_ids": self._padded(rows, "input_ids", inside, self.tokenizer.pad_token_id)}
        if "token_type_ids" in rows[0]:
            batch["token_type_ids"] = self._padded(rows, "token_type_ids", inside, self.tokenizer.pad_token_type_id)
        if "copy_number" in rows[0]:
            batch["copy_number"] = torch.tensor([row["copy_number"] for row in rows])
        if not inside.all():
            batch["attention_mask"] = inside.long()
        given = torch.tensor([row.get("prompt_length", 0) for row in rows])
        labelled = maskable_tokens(batch["input_ids"], self.tokenizer, inside) & (columns >= given[:, None])
        batch["labels"] = batch["input_ids"].masked_fill(~labelled, -100)
        return batch

    @staticmethod
    def _padded(rows, name, inside, padding):
        ids = torch.cat([torch.as_tensor(row[name], dtype=torch.long) for row in rows])
        if inside.all():
            return ids.view(inside.shape)
        if padding is None:
            raise ValueError("The tokenizer has no padding token, which rows of unequal length need.")
        return torch.full(inside.shape, padding).masked_scatter(inside, ids)


def filled(row: dict, length: int, terminator: int) -> dict:
    """A row with terminators after it, up to `length`."""
    missing = max(0, length - len(row["input_ids"]))
    row = {**row, "input_ids": [*row["input_ids"], *[terminator] * missing]}
    if "token_type_ids" in row:
        row["token_type_ids"] = [*row["token_type_ids"], *[row["token_type_ids"][-1]] * missing]
    return row


def without_padding(row: dict) -> dict:
    """A row without what its own `attention_mask` leaves out."""
    if "attention_mask" not in row:
        return row
    kept = [i for i, attended in enumerate(row["attention_mask"]) if attended]
    names = [name for name in ("input_ids", "token_type_ids") if name in row]
    rest = {name: value for name, value in row.items() if name != "attention_mask"}
    return {**rest, **{name: [row[name][i] for i in kept] for name in names}}


__all__ = ["DataCollatorForTextDiffusion"]
