"""Fixed-length training rows out of texts of any length."""

from collections.abc import Iterable

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
    start, terminator = start_id(tokenizer), terminator_id(tokenizer)
    texts = list(texts)
    id_lists = (
        tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] if texts else []
    )
    end = [] if terminator is None else [terminator]
    stream = torch.tensor([i for ids in id_lists for i in ids + end], dtype=torch.long)
    body = max_length - (start is not None)
    if len(stream) < body:
        raise ValueError(f"The corpus has {len(stream)} tokens, too few for one row of `max_length` {max_length}.")
    rows = stream[: len(stream) // body * body].view(-1, body)
    return rows if start is None else torch.cat([rows.new_full((len(rows), 1), start), rows], dim=1)


__all__ = ["pack_texts"]
