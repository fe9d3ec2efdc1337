"""Counts what a test leaves behind in this process: child processes, descriptors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LEFT_SECONDS = 2.0
"""A thread may have a file open for a moment; what stays open for longer is left behind."""


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Raises `AssertionError` if there is more of anything some seconds after the block than there was before it. Real seconds:
    those of the loop may be virtual."""
    before = count_resources()
    yield
    deadline = time.monotonic() + LEFT_SECONDS
    while left := find_left_resources(before):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def find_left_resources(before: tuple[int, int]) -> str:
    """What there is more of than before; fewer is no fault, for what a test before left may be gone by now."""
    counts = zip(("child processes", "descriptors"), before, count_resources(), strict=True)
    return ", ".join(f"{now - then} {name}" for name, then, now in counts if now > then)


def count_resources() -> tuple[int, int]:
    """Child processes, and descriptors in use (sockets, pipes, files) of this very process."""
    process = psutil.Process()
    return len(process.children(recursive=True)), process.num_fds()
