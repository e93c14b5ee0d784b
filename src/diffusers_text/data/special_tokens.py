"""Which tokens of a tokenizer take part in diffusion."""

import torch
from transformers import PreTrainedTokenizerBase


def terminator_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends a text: end-of-sequence, else the separator; None when the tokenizer has neither."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def start_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that begins a text: CLS, else beginning-of-sequence; None when the tokenizer has neither."""
    return tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All special tokens, those without a role (`all_special_ids` leaves these out) among them."""
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def frame_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Special tokens that are no part of a text. The unknown token is one, unless it begins or ends texts as well."""
    words = {tokenizer.unk_token_id} - {terminator_id(tokenizer), start_id(tokenizer)}
    return special_ids(tokenizer) - words


def token_settings(tokenizer: PreTrainedTokenizerBase) -> dict:
    r"""
    The scheduler settings that follow from a tokenizer.

    Args:
        tokenizer: with a mask token.

    Returns:
        `dict`: `mask_token_id`, `vocab_size` and `suppressed_token_ids` (all special tokens but the mask token and the
        terminator) of [`AbsorbingStateScheduler`].

    Raises:
        ValueError: the tokenizer has no mask token.

    Example:

    ```python
    >>> from diffusers_text import AbsorbingStateScheduler, token_settings

    >>> scheduler = AbsorbingStateScheduler(**token_settings(tokenizer), schedule="cosine")
    ```
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no mask token, which masked diffusion needs: call"
            " `tokenizer.add_special_tokens({'mask_token': '[MASK]'})` and"
            " `model.resize_token_embeddings(len(tokenizer))`, then train."
        )
    sampled = {tokenizer.mask_token_id, terminator_id(tokenizer)}
    return {
        "mask_token_id": tokenizer.mask_token_id,
        "vocab_size": len(tokenizer),
        "suppressed_token_ids": sorted(special_ids(tokenizer) - sampled),
    }


def literal_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """The token ids of texts to be scored: what reads like a special token is text as well."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, truncation=False, verbose=False)[
        "input_ids"
    ]


def maskable_tokens(
    input_ids: torch.LongTensor, tokenizer: PreTrainedTokenizerBase, attention_mask: torch.Tensor | None = None
) -> torch.BoolTensor:
    r"""
    Which tokens are noised, counted and scored: all but those at the start of a text (CLS, else BOS), masks and
    padding.

    Args:
        input_ids (`torch.LongTensor` of any shape): token ids.
        tokenizer: the tokenizer they come from.
        attention_mask (`torch.Tensor` of the same shape, *optional*):
            0 for padding; needed where the padding token is the terminator, and so not to be told by its id.

    Returns:
        `torch.BoolTensor` of the same shape.

    Example:

    ```python
    >>> input_ids = tokenizer(["We agree.", "No."], padding=True, return_tensors="pt").input_ids
    >>> maskable_tokens(input_ids, tokenizer).sum(dim=1)  # words, full stop and [SEP]
    tensor([4, 3])
    ```
    """
    fixed = {start_id(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id} - {None, terminator_id(tokenizer)}
    maskable = ~torch.isin(input_ids, torch.tensor(sorted(fixed), dtype=torch.long, device=input_ids.device))
    return maskable if attention_mask is None else maskable & (attention_mask != 0)


__all__ = ["frame_ids", "literal_ids", "maskable_tokens", "start_id", "terminator_id", "token_settings"]
