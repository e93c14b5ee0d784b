"""The rows of a corpus, with all of its tokens and words."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.collators import filled, without_padding
from ..data.packing import pack_ids
from ..data.special_tokens import literal_ids, maskable_tokens, start_id, terminator_id
from ..noising import row_key

TEXTS_AT_ONCE = 1000  # that the tokenizer gets


class Corpus(NamedTuple):
    """Rows that an evaluation goes through, and what they were made of."""

    rows: list[dict]  # `input_ids`, and where a beginning is given `prompt_length` and perhaps `token_type_ids`
    tokens: int  # that can be noised
    texts: int | None  # with words in them; None where token ids were given
    words: int | None  # between white space
    blank_texts: int
    split_texts: int  # longer than a row, and so in several
    packing: bool | None

    def filled(self, length: int, tokenizer: PreTrainedTokenizerBase) -> "Corpus":
        """The rows with terminators after them, up to `length`, which count as no tokens of the corpus."""
        if terminator_id(tokenizer) is None:
            raise ValueError("`fill_rows` needs a tokenizer with an end-of-text token.")
        return self._replace(rows=[filled(row, length, terminator_id(tokenizer)) for row in self.rows])

    @property
    def keys(self) -> list[tuple[int, int]]:
        """What the noise of each row depends on: its tokens, and how many rows before it are the same."""
        return numbered_keys(self.rows)


def numbered_keys(rows: Iterable[dict]) -> list[tuple[int, int]]:
    """The [`~noising.row_key`] of each row without padding, and how many rows before it are the same."""
    seen, keys = Counter(), []
    for row in rows:
        key = row_key(row["input_ids"])
        whole = (key, row.get("prompt_length", 0), tuple(row.get("token_type_ids", ())))
        keys.append((key, seen[whole]))
        seen[whole] += 1
    return keys


def encode_corpus(
    texts: Iterable[str] | Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    text_column: str = "text",
    packing: bool = True,
    long_texts: str = "split",
    progress_bar: Callable = partial(tqdm, disable=True),  # noqa: B008
) -> Corpus:
    r"""
    The rows of a corpus of texts. None of its tokens is left out.

    Args:
        texts (iterable of `str` or `datasets.Dataset`):
            Texts, of which blank ones and nulls are counted and passed over; or rows with `input_ids`, as
            [`prepare_texts`] and its like make them.
        tokenizer: the model's tokenizer.
        max_length (`int`): longest row in tokens, special tokens included.
        text_column (`str`, defaults to `"text"`): where a dataset has its texts.
        packing (`bool`, defaults to `True`):
            Texts one after another, cut into rows of `max_length` of which the last may be shorter (MDLM, arXiv
            2406.07524); or a text a row (DiffusionBERT, arXiv 2211.15029).
        long_texts (`str`, defaults to `"split"`):
            What happens to a text that does not fit into its row: `"split"` cuts it into several, `"error"` raises.
        progress_bar (`Callable`, *optional*): makes a bar out of a total; there is none by default.

    Raises:
        ValueError: no text, something that is no text, or one that is too long where that is an error.
    """
    if type(max_length) is not int or max_length < 3:
        raise ValueError(f"`max_length` must be an integer >= 3, got {max_length!r}.")
    if long_texts not in ("split", "error"):
        raise ValueError(f"`long_texts` must be 'split' or 'error', got {long_texts!r}.")
    if packing and long_texts == "error":
        raise ValueError("`long_texts='error'` goes with `packing=False`: packed texts are cut wherever a row ends.")
    if isinstance(texts, Dataset) and "input_ids" in texts.column_names:
        return _given_rows(texts, tokenizer, max_length)
    if isinstance(texts, Dataset):
        if text_column not in texts.column_names:
            raise ValueError(f"The dataset has no column {text_column!r}, it has {sorted(texts.column_names)}.")
        texts = texts[text_column]
    id_lists, words, blank = [], 0, 0
    if isinstance(texts, str):
        raise ValueError(f"The corpus must be a list of texts, got one text, {texts[:60]!r}.")
    if isinstance(texts, Mapping):
        raise ValueError(f"The corpus must be a list of texts or one split of a dataset, got {sorted(texts)}.")
    texts = list(texts)
    with progress_bar(total=len(texts)) as bar:
        bar.set_description("Tokenizing")
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            part = texts[start : start + TEXTS_AT_ONCE]
            for number, text in enumerate(part, start):
                if text is not None and not isinstance(text, str):
                    raise ValueError(f"Text {number} is no text, but {text!r:.60}.")
            kept = [text for text in part if text is not None and text.strip()]
            blank += len(part) - len(kept)
            words += sum(len(text.split()) for text in kept)
            if kept:
                id_lists += literal_ids(tokenizer, kept)
            bar.update(len(part))
    if not id_lists:
        raise ValueError(f"The corpus has no text: {len(texts)} texts, {blank} of them blank.")
    if packing:
        rows, split = pack_ids(id_lists, tokenizer, max_length), 0
    else:
        # A piece that is not the last has no terminator: the text does not end there.
        pieces = [pack_ids([ids], tokenizer, max_length) for ids in id_lists]
        too_long = [number for number, piece in enumerate(pieces) if len(piece) > 1]
        if too_long and long_texts == "error":
            fit = max_length - (start_id(tokenizer) is not None) - (terminator_id(tokenizer) is not None)
            raise ValueError(
                f"{len(too_long)} texts are longer than `max_length` {max_length}, the first of them number"
                f" {too_long[0]} of those that are not blank, with {len(id_lists[too_long[0]])} tokens of {fit}."
            )
        rows, split = [row for piece in pieces for row in piece], len(too_long)
    rows = [{"input_ids": row} for row in rows]
    return Corpus(rows, _count_tokens(rows, tokenizer), len(id_lists), words, blank, split, packing)


def _given_rows(dataset: Dataset, tokenizer, max_length: int) -> Corpus:
    columns = ("input_ids", "attention_mask", "prompt_length", "token_type_ids")
    names = [name for name in columns if name in dataset.column_names]
    rows = [without_padding({name: row[name] for name in names}) for row in dataset]
    if not rows:
        raise ValueError("The corpus has no rows.")
    for number, row in enumerate(rows):
        if len(row["input_ids"]) > max_length:
            raise ValueError(f"Row {number} has {len(row['input_ids'])} tokens, over `max_length` {max_length}.")
        row["input_ids"] = np.asarray(row["input_ids"])
    return Corpus(rows, _count_tokens(rows, tokenizer), None, None, 0, 0, None)


def _count_tokens(rows: list[dict], tokenizer) -> int:
    """How many tokens of the rows can be noised: all, but for what is given."""
    total = 0
    for row in rows:
        maskable = maskable_tokens(torch.as_tensor(row["input_ids"]), tokenizer)
        total += int(maskable[row.get("prompt_length", 0) :].sum())
    if not total:
        raise ValueError("The corpus has no token that can be noised.")
    return total
