"""Keys and values of every slot, in a few large tensors that every layer's step works on without gathering.

Active rows are always rows ``[0, n)``. Memory grows with the longest history that was ever needed, up to the limit. Models
differ in layout, so a block is any tensor with one dimension of slots and a later one of time.
"""

from dataclasses import dataclass

import torch

INITIAL_CAPACITY = 112
"""Tokens per slot at the start. Not a power of two: rows 2^n bytes apart would fight for the same lines of the cache."""


@dataclass
class Block:
    """One tensor of the cache; ``slot`` and ``time`` name its dimensions, ``slot`` < ``time``."""

    tensor: torch.Tensor
    slot: int
    time: int

    def row(self, row: int, start: int, stop: int) -> torch.Tensor:
        """A view on tokens ``[start, stop)`` of one slot."""
        return self.tensor.select(self.slot, row).narrow(self.time - 1, start, stop - start)

    def grow(self, capacity: int) -> None:
        shape = list(self.tensor.shape)
        shape[self.time] = capacity
        grown = torch.zeros(shape, dtype=self.tensor.dtype, device=self.tensor.device)
        grown.narrow(self.time, 0, self.tensor.shape[self.time]).copy_(self.tensor)
        self.tensor = grown


@dataclass(frozen=True)
class State:
    """A copy of one history's keys and values, tokens ``[start, stop)``, one tensor per block."""

    tensors: tuple[torch.Tensor, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class SlotCache:
    """The blocks of one model. All of them hold ``capacity`` tokens per slot; memory begins as zeros, never as garbage,
    because masked positions still take part in sums. ``spare`` further slots are not for histories."""

    def __init__(self, slots: int, max_model_len: int, *, spare: int = 0) -> None:
        self.slots = slots
        self._spare = spare
        self.max_model_len = max_model_len
        self.capacity = min(INITIAL_CAPACITY, max_model_len)
        self.blocks: list[Block] = []

    def add(self, shape: tuple[int, ...], *, slot: int, time: int, dtype: torch.dtype, device: torch.device) -> Block:
        """A further block of zeros; ``shape`` has any number in place of slots and time."""
        sizes = list(shape)
        sizes[slot], sizes[time] = self.slots + self._spare, self.capacity
        block = Block(torch.zeros(sizes, dtype=dtype, device=device), slot, time)
        self.blocks.append(block)
        return block

    def reserve(self, length: int) -> None:
        """Make room for histories of ``length`` tokens, and for as many again if that is within ``max_model_len``."""
        if length > self.capacity:
            self.capacity = max(length, min(2 * self.capacity, self.max_model_len))
            for block in self.blocks:
                block.grow(self.capacity)

    def save(self, row: int, start: int, stop: int) -> State:
        return State(tuple(block.row(row, start, stop).clone() for block in self.blocks), start, stop)

    def restore(self, row: int, state: State, start: int, stop: int) -> None:
        """Copy what a saved state has of tokens ``[start, stop)`` into a slot."""
        start, stop = max(start, state.start), min(stop, state.stop)
        if start < stop:
            for block, tensor in zip(self.blocks, state.tensors, strict=True):
                saved = tensor.narrow(block.time - 1, start - state.start, stop - start)
                block.row(row, start, stop).copy_(saved)

    def move(self, source: int, target: int, start: int, stop: int) -> None:
        if start < stop:
            for block in self.blocks:
                block.row(target, start, stop).copy_(block.row(source, start, stop))

    def wipe(self, row: int) -> None:
        """Overwrite a slot that holds values that are not finite: a zero weight does not hide those."""
        for block in self.blocks:
            block.row(row, 0, self.capacity).zero_()
