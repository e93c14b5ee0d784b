"""The texts of a call while they are written: which positions are whose, block by block, window by window."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..data.special_tokens import frame_ids, start_id, terminator_id
from .pipeline_output import TextDiffusionTrajectory


@dataclass
class Canvas:
    """
    Token ids of a batch on the CPU, where reading them waits for nothing. Rows are padded on the right; the last
    column is padding in every row.

    Args:
        sample (`torch.LongTensor` of shape `[batch, seq]`): the ids.
        lengths (`list[int]`): the length of each row.
        generated (`torch.BoolTensor` of shape `[batch, seq]`): the `gen_length` new tokens.
        given (`torch.BoolTensor` of shape `[batch, seq]`): the prompt's tokens, without special ones.
        token_type_ids (`torch.LongTensor` of shape `[batch, seq]`, *optional*): segments.
        starts (`list[int]`): where the text of each row begins, behind its source.
        mask_token_id (`int`), terminator (`int`, *optional*), start (`int`, *optional*): ids of the tokenizer.
        in_blocks (`bool`): whether rows are written block by block, until they end.
    """

    sample: torch.LongTensor
    lengths: list[int]
    generated: torch.BoolTensor
    given: torch.BoolTensor
    token_type_ids: torch.LongTensor | None
    starts: list[int]
    mask_token_id: int
    terminator: int | None
    start: int | None
    in_blocks: bool
    changes: list[torch.Tensor] | None = None  # [5, m] each: step, row, position, id, time
    step: int = 0

    @classmethod
    def of_texts(
        cls,
        texts: list[list[int]],
        generated: list[range],
        types: list[list[int] | None],
        starts: list[int],
        tokenizer,
        suppressed: list[int],
        in_blocks: bool,
    ):
        """
        The canvas of rows of ids, with the columns of their new tokens and their segments, if any; `suppressed` ids
        are never drawn.
        """
        # Padding is attended to by nothing and returned to nobody. It must be no mask, and no terminator, which a
        # sentence's mean would count.
        meaningful = (tokenizer.mask_token_id, terminator_id(tokenizer))
        padding = tokenizer.pad_token_id
        if padding not in suppressed:
            padding = suppressed[0] if suppressed else next(i for i in range(3) if i not in meaningful)
        lengths = [len(text) for text in texts]
        width = max(lengths) + 1

        def padded(rows: list[list[int]], value: int) -> torch.LongTensor:
            return torch.tensor([row + [value] * (width - len(row)) for row in rows])

        sample = padded(texts, padding)
        token_type_ids = None if types[0] is None else padded(types, tokenizer.pad_token_type_id)
        columns = torch.arange(width)
        first, end = (torch.tensor(bounds)[:, None] for bounds in zip(*((new.start, new.stop) for new in generated)))
        is_generated = (columns >= first) & (columns < end)
        inside = columns < torch.tensor(lengths)[:, None]
        given = inside & ~torch.isin(sample, torch.tensor(sorted(frame_ids(tokenizer))))
        ids = (tokenizer.mask_token_id, terminator_id(tokenizer), start_id(tokenizer))
        return cls(sample, lengths, is_generated, given, token_type_ids, starts, *ids, in_blocks)

    @property
    def masked(self) -> torch.BoolTensor:
        """Where the canvas is masked, `[batch, seq]`."""
        return self.sample == self.mask_token_id

    def ended(self) -> torch.BoolTensor:
        """Which rows have a terminator among their new tokens, `[batch]`."""
        if self.terminator is None:
            return torch.zeros(len(self.sample), dtype=torch.bool)
        return ((self.sample == self.terminator) & self.generated).any(dim=1)

    def blocks(self, block_length: int | None) -> Iterator[torch.BoolTensor]:
        """
        The masked positions `[batch, seq]` of each block: in every row `block_length` of them from left to right, or
        all at once.
        """
        masked = self.masked
        if block_length is None:
            return iter([masked])
        block = (masked.cumsum(dim=1) - 1) // block_length
        return (masked & (block == i) for i in range(int(block.max()) + 1))

    def window(self, active: torch.BoolTensor, limit: int) -> torch.LongTensor:
        r"""
        The part of each row that the model sees, `limit` tokens at most: the whole row where it fits, otherwise the
        first window that holds its `active` positions, after the row's start token.

        Returns:
            `torch.LongTensor` of shape `[batch, width]`: columns of the canvas, the last one for padding.
        """
        longest = max(self.lengths)
        if longest <= limit:
            return torch.arange(longest).expand(len(self.sample), -1)
        index = torch.full((len(self.sample), limit), self.sample.shape[1] - 1)
        for i, length in enumerate(self.lengths):
            anchor = int(length > limit and self.sample[i, 0] == self.start)
            ends = active[i].nonzero().flatten() + 1
            first = max(anchor, int(ends.max()) - (limit - anchor)) if len(ends) else anchor
            columns = torch.arange(first, min(first + limit - anchor, length))
            index[i, :anchor] = 0
            index[i, anchor : anchor + len(columns)] = columns
        return index

    def widest_window(self, blocks: Iterator[torch.BoolTensor]) -> int:
        """Tokens that the widest block needs in its window, the start token included."""
        anchors = [int(first == self.start) for first in self.sample[:, 0].tolist()]
        spans = [
            int(columns.max() - columns.min()) + 1 + anchor
            for block in blocks
            for row, anchor in zip(block, anchors, strict=True)
            if len(columns := row.nonzero())
        ]
        return max(spans, default=0)

    def update(self, index: torch.LongTensor, window: torch.LongTensor, times: torch.Tensor):
        """Writes `window` [batch, width] back to the columns `index`, and what changes into a record that is kept."""
        if self.changes is not None:
            before = self.sample.gather(1, index)
            row, column = (window != before).nonzero(as_tuple=True)
            record = [torch.full_like(row, self.step), row, index[row, column], window[row, column], times[row]]
            self.changes.append(torch.stack([entry.double() for entry in record]))
        self.sample.scatter_(1, index, window)
        self.step += 1

    def ends(self) -> list[int]:
        """Where each row ends: in blocks behind its first new terminator, as soon as all before it is written."""
        if not self.in_blocks or self.terminator is None:
            return self.lengths
        terminators = (self.sample == self.terminator) & self.generated
        first = terminators.long().argmax(dim=1)  # 0 in rows without one
        written = self.masked.cumsum(dim=1).gather(1, first[:, None])[:, 0] == 0
        ends = (first + 1).where(terminators.any(dim=1) & written, torch.tensor(self.lengths))
        return ends.tolist()

    def sequences(self, device) -> list[torch.LongTensor]:
        """The ids of each row without padding, `[seq]` each."""
        return [row[:end].to(device, copy=True) for row, end in zip(self.sample, self.ends(), strict=True)]

    def trajectories(self) -> list[TextDiffusionTrajectory] | None:
        """What was written in each row, in order."""
        if self.changes is None:
            return None
        changes = torch.cat([torch.empty(5, 0, dtype=torch.float64), *self.changes], dim=1)
        trajectories = []
        for row, end in enumerate(self.ends()):
            step, _, position, token, time = changes[:, (changes[1] == row) & (changes[2] < end)]
            trajectories.append(TextDiffusionTrajectory(step.long(), position.long(), token.long(), time))
        return trajectories
