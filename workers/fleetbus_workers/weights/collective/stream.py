"""The stream of one version: its size, then the bytes of its file in pieces of the same size on both sides. Both calls block.

The engine looks at each piece while the next one is on its way: digests are there with the last byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from fleetbus_workers.weights.collective.group import STALL_SECONDS, Group
from fleetbus_workers.weights.collective.received import ReceivedVersion
from fleetbus_workers.weights.collective.written_file import WrittenFile
from fleetbus_workers.weights.file import view_bytes
from fleetbus_workers.weights.transfer import TransferFailed

PIECE_BYTES = 8 << 20
"""A multiple of every type's size, so that no number is cut."""


def send_version(group: Group, source: WrittenFile, ends: float) -> int:
    """Send a file while it is written, and return its size in bytes. ``ends``: of `time.monotonic`. Raises `TransferFailed`."""
    size = source.wait_for_size(_remaining(ends))
    group.broadcast(torch.tensor([size], dtype=torch.int64))()
    buffers = [torch.empty(min(PIECE_BYTES, size), dtype=torch.uint8) for _ in range(2)]
    wait: Callable[[], None] = _nothing
    for number, (start, stop) in enumerate(_iterate_pieces(size)):
        piece = buffers[number % 2][: stop - start]
        source.read(view_bytes(piece), start, min(STALL_SECONDS, _remaining(ends)))
        wait()
        wait = group.broadcast(piece)
    wait()
    return size


def receive_version(group: Group, *, limit_bytes: int, ends: float, is_over: Callable[[], bool]) -> ReceivedVersion:
    """Receive a version of ``limit_bytes`` at most, checked as far as that goes without a manifest. Raises `TransferFailed`."""
    announced = torch.zeros(1, dtype=torch.int64)
    group.broadcast(announced)()
    size = int(announced)
    if not 0 < size <= limit_bytes:
        raise TransferFailed(f"a version of {size} bytes was announced, and this model has {limit_bytes} at most")
    content = torch.empty(size, dtype=torch.uint8)
    version = ReceivedVersion(content)
    arrived = 0
    for start, stop in _iterate_pieces(size):
        wait = group.broadcast(content[start:stop])
        version.advance(arrived)
        wait()
        arrived = stop
        if is_over() or _remaining(ends) == 0:
            raise TransferFailed("the version is given up")
    version.advance(arrived)
    return version


def _iterate_pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, size)


def _remaining(ends: float) -> float:
    return max(ends - time.monotonic(), 0.0)


def _nothing() -> None:
    """There is no piece before the first one."""
