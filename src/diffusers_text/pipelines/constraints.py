"""What may not be written where: rules of one pipeline call, applied to logits before a scheduler draws from them."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
from transformers import LogitsProcessorList

from ..schedulers.sampling import is_number


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

    def apply(
        self, logits: torch.Tensor, sample: torch.LongTensor, positions: torch.LongTensor, asked: torch.LongTensor
    ) -> torch.Tensor:
        r"""
        Logits `[m, vocab]` with -inf for what is ruled out at `positions` [m] of `sample` [batch, seq], of the `asked`
        positions [n] that are drawn together.

        Raises:
            ValueError: nothing is allowed at a position.
        """
        if self.terminator is not None:
            in_gap = ~self.generated.flatten()[positions]
            logits[:, self.terminator].sub_(self.eos_penalty).masked_fill_(
                in_gap.to(logits.device, non_blocking=True), -torch.inf
            )
        if self.suppress_tokens:
            logits[:, self.suppress_tokens] = -torch.inf
        for row, token in self._completions(sample, positions, asked):
            logits[row, token] = -torch.inf
        if self.logits_processor is not None:
            logits = self._processed(logits, sample, positions)
        if self.allowed_token_ids is not None:
            logits = logits.masked_fill(~self._allowed(logits, sample, positions), -torch.inf)
        if self.restricts:
            possible = logits[:, : self.vocab_size] > -torch.inf
            possible[:, self.undrawn] = False
            blocked = positions[~possible.any(dim=-1).cpu()] % sample.shape[1]
            if len(blocked):
                raise ValueError(f"The constraints allow no token at position {blocked[0]} of the canvas.")
        return logits

    @property
    def restricts(self) -> bool:
        """Whether anything but the terminator is ruled out."""
        rules = (self.suppress_tokens, self.bad_words_ids, self.logits_processor)
        return any(rules) or self.allowed_token_ids is not None

    def _completions(self, sample, positions, asked):
        """
        Pairs (index into `positions`, token) that would complete a bad word. Where several positions of one are drawn
        together, its token is ruled out at the last of them, whatever the others will be.
        """
        if not self.bad_words_ids:
            return
        seq_len, ids, together = sample.shape[1], sample.flatten().tolist(), set(asked.tolist())

        def may_complete(word, start, position):
            for place, token in enumerate(word, start):
                if place != position and (place > position if place in together else ids[place] != token):
                    return False
            return True

        for i, position in enumerate(positions.tolist()):
            column = position % seq_len
            for word in self.bad_words_ids:
                for offset, token in enumerate(word[: column + 1]):
                    inside = column - offset + len(word) <= seq_len
                    if inside and may_complete(word, position - offset, position):
                        yield i, token

    def _processed(self, logits, sample, positions):
        seq_len, processed = sample.shape[1], []
        for scores, position in zip(logits, positions.tolist(), strict=True):
            row, column = divmod(position, seq_len)
            before = sample[None, row, :column].to(logits.device)
            processed.append(self.logits_processor(before, scores[None]))
        return torch.cat(processed)

    def _allowed(self, logits, sample, positions):
        if callable(self.allowed_token_ids):
            allowed = self.allowed_token_ids(sample, positions)
            wanted = [len(positions), self.vocab_size]
            if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool or [*allowed.shape] != wanted:
                given = f"{allowed.dtype} of {[*allowed.shape]}" if isinstance(allowed, torch.Tensor) else allowed
                raise ValueError(f"`allowed_token_ids` must return a BoolTensor of shape {wanted}, got {given}.")
        else:
            allowed = self.allowed_token_ids[positions % sample.shape[1]]
        beyond = logits.shape[-1] - allowed.shape[-1]  # a padded head has more ids than the tokenizer
        return torch.nn.functional.pad(allowed, (0, beyond)).to(logits.device)


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
                f"`allowed_token_ids` must be callable or a BoolTensor of shape [seq, {vocab_size}], vocabulary last."
            )
