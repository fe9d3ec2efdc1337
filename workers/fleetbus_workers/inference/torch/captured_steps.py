"""Steps of `FusedRunner` on a GPU as CUDA graphs: a step of a small model is a thousand short kernels, and to launch them one
by one takes the processor several times as long as the GPU computes.

Used by `FusedRunner`; below it the kernel. A graph is captured once for at most so many rows and tokens, and replayed for all
steps that fit: rows that are not there write into a slot that nobody reads. Steps that bring prompts along are not captured
(docs/decisions/0237-engine-torch-on-a-gpu.md).
"""

from collections.abc import Callable

import numpy as np
import torch

from fleetbus_workers.inference.torch.batch import Batch
from fleetbus_workers.inference.torch.kernel import Tokens, Weights, compute_logits
from fleetbus_workers.inference.torch.slots import Block, SlotCache

LEAST_ROWS, LEAST_TOKENS = 8, 128
"""Of a graph; others have two, four, ... times as many."""

Compute = Callable[[], torch.Tensor]
Capture = Callable[[Compute], tuple[torch.Tensor, Callable[[], None]]]
"""Takes what computes a tensor; returns that tensor, and what computes it again into the same memory."""


class GraphCapture:
    """`Capture` by CUDA; all graphs share their memory, so that one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> tuple[torch.Tensor, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # what libraries set up at a first call cannot be captured
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # By thread: another one may be preparing the next version of the weights.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            computed = compute()
        return computed, graph.replay


class CapturedSteps:
    """The graphs of one model; they compute with ``weights``, whose numbers may change, and with the cache as it is. The last
    slot of ``keys`` and ``values`` is beyond those of ``cache``."""

    def __init__(
        self, weights: Weights, cache: SlotCache, keys: Block, values: Block, groups: int, capture: Capture | None = None
    ) -> None:
        self._weights, self._cache, self._keys, self._values = weights, cache, keys, values
        self._device = keys.tensor.device
        self._capture = capture or GraphCapture(self._device)
        self._group_numbers = torch.arange(groups, device=self._device)
        self._logits = torch.empty((cache.slots, weights.head.shape[1]), device=self._device)
        """Of whichever graph was replayed last: each has a different number of rows or tokens, and a vocabulary is large."""
        self._capacity = 0
        self._replays: dict[tuple[int, int], Callable[[Batch], torch.Tensor]] = {}

    def step(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocabulary] of a batch without prompts; they hold until the next call."""
        if self._capacity != self._cache.capacity:  # it grew, and the graphs know where it was
            self._replays.clear()
            self._capacity = self._cache.capacity
        rows = min(_round_up(len(batch.tokens), LEAST_ROWS), self._cache.slots)
        longest = min(_round_up(batch.longest, LEAST_TOKENS), self._capacity)
        if (rows, longest) not in self._replays:
            self._replays[rows, longest] = self._build_replay(rows, longest, batch)
        return self._replays[rows, longest](batch)

    def _build_replay(self, rows: int, longest: int, first: Batch) -> Callable[[Batch], torch.Tensor]:
        given = torch.empty((3, rows), dtype=torch.int64, device=self._device)
        spare = self._cache.slots

        def fill(batch: Batch) -> None:
            count = len(batch.tokens)
            arrays = np.zeros((3, rows), dtype=np.int64)
            arrays[0, :count], arrays[1, :count] = batch.tokens, batch.positions
            arrays[2, :count], arrays[2, count:] = np.arange(count), spare
            given.copy_(torch.from_numpy(arrays))

        def compute() -> torch.Tensor:
            ids, positions, slots = given.unbind()
            lanes = slots[:, None] * len(self._group_numbers) + self._group_numbers
            tokens = Tokens(ids, lanes, positions, rows, longest, 0, [], [], [])
            computed = compute_logits(self._weights, tokens, self._keys.tensor, self._values.tensor)
            return self._logits[:rows].copy_(computed)

        fill(first)
        logits, replay = self._capture(compute)

        def step(batch: Batch) -> torch.Tensor:
            fill(batch)
            replay()
            return logits[: len(batch.tokens)]

        return step


def copy_weights(target: Weights, source: Weights) -> None:
    """Let ``target`` hold the numbers of another version of the same model, where graphs look for them."""
    for into, tensor in zip(_list_tensors(target), _list_tensors(source), strict=True):
        if into is not tensor:
            into.copy_(tensor)


def _round_up(count: int, least: int) -> int:
    """The first of ``least``, twice as much, ... that is not below ``count``."""
    return int(max(least, 1 << (count - 1).bit_length()))


def _list_tensors(weights: Weights) -> list[torch.Tensor]:
    layers = [tensor for layer in weights.layers for tensor in layer if tensor is not None]
    return [weights.embedding, *layers, weights.head, weights.rotation, weights.epsilon, weights.head_epsilon]
