"""From prompts to token ids."""

from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..data.special_tokens import terminator_id
from ..schedulers.sampling import described


class Prompt(NamedTuple):
    """A prompt as a model sees it, without padding."""

    ids: list[int]  # special tokens included
    token_type_ids: list[int] | None
    start: int  # where the text begins that is given back: behind a source


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[str] | None, source: str | list[str] | None
) -> list[Prompt]:
    """Texts, each alone, or as the second of a pair behind its source."""
    if source is None:
        prompts = prompt if isinstance(prompt, list) else [prompt or ""]
        rows = tokenizer(prompts, truncation=False, padding=False, verbose=False)["input_ids"]
        return [Prompt(ids, None, 0) for ids in rows]
    sources = source if isinstance(source, list) else [source]
    prompts = prompt if isinstance(prompt, list) else [prompt or ""] * len(sources)
    encoded = tokenizer(sources, prompts, truncation=False, padding=False, verbose=False)
    rows = []
    for i, ids in enumerate(encoded["input_ids"]):
        parts = encoded.sequence_ids(i)
        types = encoded["token_type_ids"][i] if "token_type_ids" in encoded else None
        # Of an empty prompt only the closing separator is left, if the tokenizer writes one.
        behind = len(ids) - (parts[-1:] == [None])
        rows.append(Prompt(ids, types, parts.index(1) if 1 in parts else behind))
    return rows


def encode_ids(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None,
    token_type_ids: torch.LongTensor | None,
) -> list[Prompt]:
    """Rows of ids `[batch, seq]` or `[seq]` without their padding."""
    input_ids = input_ids.reshape(-1, input_ids.shape[-1])
    if attention_mask is not None:
        keep = attention_mask.reshape(input_ids.shape) != 0
    elif tokenizer.pad_token_id in (None, terminator_id(tokenizer)):
        keep = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        keep = input_ids != tokenizer.pad_token_id
    if not keep.any(dim=1).all():
        row = int(keep.any(dim=1).long().argmin())
        raise ValueError(f"`input_ids` has nothing but padding in row {row}.")
    types = [None] * len(input_ids)
    if token_type_ids is not None:
        types = [row[kept].tolist() for row, kept in zip(token_type_ids.reshape(input_ids.shape), keep, strict=True)]
    return [Prompt(row[kept].tolist(), own, 0) for row, kept, own in zip(input_ids, keep, types, strict=True)]


def check_prompts(prompt, source, input_ids, attention_mask, token_type_ids, vocab_size: int):
    """Raises a `ValueError` for the first of these arguments of a pipeline's call that is out of range."""
    if input_ids is not None and (prompt is not None or source is not None):
        raise ValueError(f"Pass either `{'prompt' if source is None else 'source'}` or `input_ids`, not both.")
    for name, texts in (("prompt", prompt), ("source", source)):
        if texts is None or isinstance(texts, str):
            continue
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"`{name}` must be a string or a list of strings, got {texts!r}.")
        if not texts:
            raise ValueError(f"`{name}` is an empty list; pass at least one text, or None to generate from nothing.")
    if source is not None and isinstance(prompt, list) and (isinstance(source, str) or len(source) != len(prompt)):
        given = "one text" if isinstance(source, str) else f"{len(source)} texts"
        raise ValueError(f"`source` has {given} for the {len(prompt)} of `prompt`: pass a list with one for each.")
    if input_ids is not None:
        if not isinstance(input_ids, torch.Tensor) or input_ids.dtype != torch.long or input_ids.ndim not in (1, 2):
            given = described(input_ids) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise ValueError(f"`input_ids` must be a LongTensor of shape [batch, seq] or [seq], got {given}.")
        if input_ids.numel() == 0:
            raise ValueError(f"`input_ids` is empty: its shape is {list(input_ids.shape)}.")
        if input_ids.min() < 0 or input_ids.max() >= vocab_size:
            raise ValueError(f"`input_ids` must lie in [0, {vocab_size}), got {input_ids.min()} to {input_ids.max()}.")
    for name, value in (("attention_mask", attention_mask), ("token_type_ids", token_type_ids)):
        shape = value.shape if isinstance(value, torch.Tensor) else None
        if value is not None and (input_ids is None or shape != input_ids.shape):
            given = list(shape) if shape is not None else type(value).__name__
            raise ValueError(f"`{name}` goes with `input_ids` and must be a tensor of its shape, got {given}.")
