"""The order in which training rows are seen."""

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..noising import ORDER, keyed_generator


class RowOrder(Sampler):
    r"""
    A shuffled order of rows that depends on the seed and the epoch alone, so that a resumed training goes on where it
    was, however many processes there are.

    Args:
        num_rows (`int`): rows of the dataset.
        seed (`int`): seed of the order.
        lengths (`list[int]`, *optional*): rows' lengths, to put rows of like length side by side.
        group_size (`int`, *optional*): rows of like length, those of an optimizer step.
    """

    def __init__(self, num_rows: int, seed: int, lengths: list[int] | None = None, group_size: int | None = None):
        self.num_rows, self.seed, self.lengths, self.group_size = num_rows, seed, lengths, group_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int):
        """Takes up the order of `epoch`."""
        generator = keyed_generator(ORDER, self.seed, epoch)
        if self.lengths is None:
            self.indices = torch.randperm(self.num_rows, generator=generator).tolist()
        else:
            self.indices = get_length_grouped_indices(self.lengths, self.group_size, generator=generator)

    def __len__(self):
        return self.num_rows

    def __iter__(self):
        return iter(self.indices)
