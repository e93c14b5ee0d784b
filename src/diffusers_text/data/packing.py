"""Fixed-length training rows out of texts of any length."""

from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .special_tokens import start_id, terminator_id


def pack_texts(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> torch.LongTensor:
    r"""
    Joins texts, a terminator after each, and cuts them into rows that begin with the start token, as MDLM does. The
    remainder that does not fill a row is dropped.

    Args:
        texts (iterable of `str`): the corpus, in order.
        tokenizer: its tokenizer.
        max_length (`int`): length of a row in tokens, the start token included.

    Returns:
        `torch.LongTensor` of shape `[rows, max_length]`.

    Raises:
        ValueError: the corpus does not fill one row, or `max_length < 2`.

    Example:

    ```python
    >>> rows = pack_texts(["We agree.", "No.", "Yes."], tokenizer, max_length=6)
    >>> tokenizer.batch_decode(rows)
    ['[CLS] we agree. [SEP] no', '[CLS]. [SEP] yes. [SEP]']
    ```
    """
    if type(max_length) is not int or max_length < 2:
        raise ValueError(f"`max_length` must be an integer >= 2, got {max_length!r}.")
    texts = list(texts)
    id_lists = (
        tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] if texts else []
    )
    rows = pack_ids(id_lists, tokenizer, max_length)
    full = [row for row in rows if len(row) == max_length]
    if not full:
        tokens = sum(map(len, rows)) - len(rows) * (start_id(tokenizer) is not None)
        raise ValueError(f"The corpus has {tokens} tokens, too few for one row of `max_length` {max_length}.")
    return torch.from_numpy(np.stack(full))


def pack_ids(id_lists: list[list[int]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[np.ndarray]:
    """
    The rows of [`pack_texts`] out of texts that are token ids without special ones; the last row holds what is left,
    and may be shorter.
    """
    start, terminator = start_id(tokenizer), terminator_id(tokenizer)
    end = [] if terminator is None else [terminator]
    stream = np.fromiter(chain.from_iterable(chain(ids, end) for ids in id_lists), dtype=np.int64)
    body = max_length - (start is not None)
    rows = [stream[i : i + body] for i in range(0, len(stream), body)]
    return rows if start is None else [np.insert(row, 0, start) for row in rows]


__all__ = ["pack_ids", "pack_texts"]
