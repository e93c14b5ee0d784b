"""Token frequencies of a corpus, for the spindle schedule."""

from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .special_tokens import maskable_tokens

BATCH_SIZE = 1000


def count_tokens(dataset: Iterable, tokenizer: PreTrainedTokenizerBase, column: str = "text") -> list[int]:
    r"""
    Counts every token that can be noised (the terminator included; no padding, no start of text, no mask).

    Args:
        dataset: a map-style or streaming `datasets` dataset, or any iterable of rows. A row is a text, a list of token
            ids, or a mapping that holds one of these under `column`. Texts get their special tokens.
        tokenizer: the model's tokenizer.
        column (`str`, defaults to `"text"`): where a mapping's text or ids are.

    Returns:
        `list[int]` of length `len(tokenizer)`.

    Raises:
        ValueError: no rows, a row of another kind, a missing column, or ids outside the vocabulary.

    Example:

    ```python
    >>> from diffusers_text import AbsorbingStateScheduler, count_tokens, token_settings

    >>> counts = count_tokens(["We the people", "of the union"], tokenizer)
    >>> counts[tokenizer.convert_tokens_to_ids("the")]
    2
    >>> scheduler = AbsorbingStateScheduler(**token_settings(tokenizer), schedule="spindle", token_counts=counts)
    ```
    """
    if isinstance(dataset, (str, bytes, dict)) or not isinstance(dataset, Iterable):
        raise ValueError(f"`dataset` must be an iterable of rows, got {type(dataset).__name__}.")
    vocab_size = len(tokenizer)
    counts = torch.zeros(vocab_size, dtype=torch.long)
    rows = iter(tqdm(dataset, desc="Counting tokens", unit=" rows"))
    while batch := list(islice(rows, BATCH_SIZE)):
        batch = [_cell(row, column) for row in batch]
        texts = [cell for cell in batch if isinstance(cell, str)]
        id_lists = [cell for cell in batch if not isinstance(cell, str)]
        if texts:
            # The corpus is counted whole, however much of a text fits a model.
            id_lists += tokenizer(texts, truncation=False, padding=False, verbose=False)["input_ids"]
        ids = torch.cat([torch.as_tensor(ids, dtype=torch.long) for ids in id_lists])
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ValueError(f"`dataset` has token ids outside [0, {vocab_size}), the vocabulary of the tokenizer.")
        counts += torch.bincount(ids[maskable_tokens(ids, tokenizer)], minlength=vocab_size)
    if not counts.any():
        raise ValueError("`dataset` has no tokens to count.")
    return counts.tolist()


def _cell(row, column):
    """The text or the ids of a row."""
    if isinstance(row, Mapping):
        if column not in row:
            raise ValueError(f"`column` {column!r} is not in the dataset, which has {sorted(row)}.")
        row = row[column]
    if isinstance(row, str) or (isinstance(row, (list, tuple)) and all(isinstance(i, int) for i in row)):
        return row
    if isinstance(row, torch.Tensor) and row.ndim == 1 and row.dtype == torch.long:
        return row
    if isinstance(row, np.ndarray) and row.ndim == 1 and np.issubdtype(row.dtype, np.integer):
        return row
    raise ValueError(f"A row of `dataset` must be a text or a list of token ids, got {type(row).__name__}.")


__all__ = ["count_tokens"]
