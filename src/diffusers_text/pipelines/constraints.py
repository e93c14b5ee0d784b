"""What may not be written where: rules of one pipeline call, applied to logits before a scheduler draws from them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import torch
from transformers import LogitsProcessorList

from ..schedulers.sampling import described, is_number


@dataclass
class TokenConstraints:
    r"""
    The rules of a call; canvas positions are flat indices over `batch * seq`.

    Args:
        terminator (`int`, *optional*): the token that ends a text.
        generated (`torch.BoolTensor` of shape `[batch, seq]`): where a terminator may stand.
        eos_penalty (`float`): nats taken from the terminator's logit.
        suppress_tokens (`list[int]`): ids that are never written.
        bad_words_ids (`list[list[int]]`): sequences of ids of which none is completed.
        allowed_token_ids (`torch.BoolTensor` of shape `[seq, vocab]` or `Callable`, *optional*):
            The ids allowed at each position of the canvas, or a function `(sample [batch, seq], positions [n])` that
            returns them, `[n, vocab]`.
        logits_processor (`LogitsProcessorList`, *optional*):
            Processors of transformers; each sees the ids before its position, gaps among them as mask tokens.
        undrawn (`list[int]`), vocab_size (`int`): ids that the scheduler never draws, and how many it may draw.
    """

    terminator: int | None
    generated: torch.BoolTensor
    eos_penalty: float
    suppress_tokens: list[int]
    bad_words_ids: list[list[int]]
    allowed_token_ids: torch.BoolTensor | Callable | None
    logits_processor: LogitsProcessorList | None
    undrawn: list[int]
    vocab_size: int

    def apply(self, logits: torch.Tensor, sample: torch.LongTensor, positions: torch.LongTensor) -> torch.Tensor:
        r"""
        Logits `[m, vocab]` with -inf for what is ruled out at `positions` [m] of `sample` [batch, seq].

        Raises:
            ValueError: nothing is allowed at a position.
        """
        if self.terminator is not None:
            in_gap = ~self.generated.flatten()[positions]
            logits[:, self.terminator].sub_(self.eos_penalty).masked_fill_(
                in_gap.to(logits.device, non_blocking=True), -torch.inf
            )
        if not self.restricts:
            return logits
        possible = self._possible(sample, positions)
        beyond = logits.shape[-1] - self.vocab_size  # a padded head has more ids than the tokenizer
        impossible = ~torch.nn.functional.pad(possible, (0, beyond)).to(logits.device, non_blocking=True)
        logits = logits.masked_fill(impossible, -torch.inf)
        if self.logits_processor is not None:  # which may give a probability to anything
            logits = self._processed(logits, sample, positions).masked_fill(impossible, -torch.inf)
        blocked = positions[(logits == -torch.inf).all(dim=-1).cpu()] % sample.shape[1]
        if len(blocked):
            raise ValueError(f"The constraints allow no token at position {blocked[0]} of the canvas.")
        return logits

    def check(self, masked: torch.BoolTensor):
        """Raises a `ValueError` where a fixed mask leaves nothing to write at a `masked` position [batch, seq]."""
        if isinstance(self.allowed_token_ids, torch.Tensor):
            blocked = masked.any(dim=0) & ~(self.allowed_token_ids & self.drawable).any(dim=-1)
            if blocked.any():
                position = int(blocked.nonzero()[0])
                raise ValueError(f"The constraints allow no token at position {position} of the canvas.")

    @property
    def restricts(self) -> bool:
        """Whether anything but the terminator is ruled out."""
        rules = (self.suppress_tokens, self.bad_words_ids, self.logits_processor)
        return any(rules) or self.allowed_token_ids is not None

    @cached_property
    def drawable(self) -> torch.BoolTensor:
        """Which ids may be written somewhere, `[vocab]`."""
        drawable = torch.ones(self.vocab_size, dtype=torch.bool)
        drawable[[i for i in (*self.undrawn, *self.suppress_tokens) if i < self.vocab_size]] = False
        if self.terminator is not None and self.eos_penalty == torch.inf:
            drawable[self.terminator] = False
        return drawable

    def _possible(self, sample, positions):
        """Which ids may be written at `positions` [m], on the CPU: [m, vocab]."""
        possible = self.drawable.repeat(len(positions), 1)
        if self.terminator is not None:
            possible[:, self.terminator] &= self.generated.flatten()[positions]
        if self.allowed_token_ids is not None:
            possible &= self._allowed(sample, positions)
        if self.bad_words_ids:
            rows = sample.tolist()
            for i, position in enumerate(positions.tolist()):
                row, column = divmod(position, sample.shape[1])
                possible[i, list(self._completing(rows[row], column))] = False
        return possible

    def apart(self, before: torch.LongTensor, after: torch.LongTensor, mask_token_id: int) -> torch.LongTensor:
        """
        The canvas `after` [batch, seq] a forward pass, without those of its new tokens that complete a bad word with
        others written at the same time, which saw nothing of each other: these stay masked, the last ones first.
        """
        new = (before == mask_token_id) & (after != mask_token_id)
        rows = after.masked_fill(new, mask_token_id).tolist()
        for row, column in new.nonzero().tolist():
            token = int(after[row, column])
            if token not in self._completing(rows[row], column):
                rows[row][column] = token
        return torch.tensor(rows)

    def _completing(self, ids: list[int], column: int) -> set[int]:
        """The tokens that would complete a bad word at `column` of a row's `ids`."""
        tokens = set()
        for word in self.bad_words_ids:
            for offset, token in enumerate(word):
                start, end = column - offset, column - offset + len(word)
                if start >= 0 and end <= len(ids):
                    others = zip((*ids[start:column], *ids[column + 1 : end]), (*word[:offset], *word[offset + 1 :]))
                    if all(found == wanted for found, wanted in others):
                        tokens.add(token)
        return tokens

    def _processed(self, logits, sample, positions):
        seq_len, processed = sample.shape[1], []
        for scores, position in zip(logits, positions.tolist(), strict=True):
            row, column = divmod(position, seq_len)
            before = sample[None, row, :column].to(logits.device)
            processed.append(self.logits_processor(before, scores[None]))
        return torch.cat(processed)

    def _allowed(self, sample, positions):
        if not callable(self.allowed_token_ids):
            return self.allowed_token_ids[positions % sample.shape[1]]
        # The last column is padding that the caller knows nothing of.
        canvas, width = sample[:, :-1].clone(), sample.shape[1]
        allowed = self.allowed_token_ids(canvas, positions - positions // width)
        wanted = [len(positions), self.vocab_size]
        if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool or [*allowed.shape] != wanted:
            raise ValueError(
                f"`allowed_token_ids` must return a BoolTensor of shape {wanted}, got {described(allowed)}."
            )
        return allowed.cpu()


def check_constraints(
    eos_penalty, suppress_tokens, bad_words_ids, allowed_token_ids, logits_processor, vocab_size: int
):
    """Raises a `ValueError` for the first argument that is no rule over ids below `vocab_size`."""

    def is_ids(ids):
        return isinstance(ids, list) and all(
            isinstance(i, Integral) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids
        )

    if not is_number(eos_penalty) or not eos_penalty >= 0:
        raise ValueError(f"`eos_penalty` must be a number of nats >= 0, got {eos_penalty!r}.")
    if suppress_tokens is not None and not is_ids(suppress_tokens):
        raise ValueError(f"`suppress_tokens` must be a list of ids in [0, {vocab_size}), got {suppress_tokens!r}.")
    if bad_words_ids is not None and (
        not isinstance(bad_words_ids, list) or not all(is_ids(word) and word for word in bad_words_ids)
    ):
        raise ValueError(
            f"`bad_words_ids` must be a list of non-empty lists of ids in [0, {vocab_size}), got {bad_words_ids!r}."
        )
    if logits_processor is not None and not isinstance(logits_processor, LogitsProcessorList):
        raise ValueError(f"`logits_processor` must be a LogitsProcessorList, got {type(logits_processor).__name__}.")
    if allowed_token_ids is not None and not callable(allowed_token_ids):
        is_mask = isinstance(allowed_token_ids, torch.Tensor) and allowed_token_ids.dtype == torch.bool
        if not is_mask or allowed_token_ids.ndim != 2 or allowed_token_ids.shape[1] != vocab_size:
            raise ValueError(
                f"`allowed_token_ids` must be callable or a BoolTensor of shape [seq, {vocab_size}], got"
                f" {described(allowed_token_ids)}."
            )
