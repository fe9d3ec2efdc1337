"""A weights file while it is written: how far it may be read, by another thread, before anybody else knows of it.

What is sent is read from the file, out of the system's cache: so nothing is held twice, and training may change the tensors
meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from fleetbus_workers.weights.transfer import TransferFailed


class WrittenFile:
    """Written by one thread (`fleetbus_workers.weights.file.WritingWatcher`), read by another. For one file: a second
    one, after a disk was full, is not followed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._descriptor: int | None = None
        self._is_over = False
        self._position = 0
        self.size = 0

    def begin(self, file: Path, size: int) -> None:
        """See `WritingWatcher`. Raises `OSError`."""
        with self._changed:
            if self._is_over or self._descriptor is not None:
                self._is_over = True
            else:
                self._descriptor, self.size = os.open(file, os.O_RDONLY), size
            self._changed.notify_all()

    def advance(self, position: int) -> None:
        """See `WritingWatcher`."""
        with self._changed:
            self._position = position
            self._changed.notify_all()

    def give_up(self) -> None:
        """Whoever reads is told that the transfer is over: at once if it waits here."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """True once it was given up."""
        return self._is_over

    def wait_for_size(self, seconds: float) -> int:
        """The size of the file in bytes, once it was begun. Raises `TransferFailed`."""
        with self._changed:
            self._wait(lambda: self.size > 0, seconds)
            return self.size

    def read(self, buffer: memoryview, start: int, seconds: float) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on, once they are written. Raises `TransferFailed`."""
        with self._changed:
            self._wait(lambda: self._position >= start + len(buffer), seconds)
            descriptor = self._descriptor
        assert descriptor is not None
        done = 0
        while done < len(buffer):
            try:
                found = os.preadv(descriptor, [buffer[done:]], start + done)
            except OSError as error:
                raise TransferFailed(f"the file cannot be read: {error}") from error
            if not found:
                raise TransferFailed("the file ended early")
            done += found

    def close(self) -> None:
        """Let go of the file; for the thread that reads, when it reads no more."""
        with self._changed:
            self._is_over = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _wait(self, is_there: Callable[[], bool], seconds: float) -> None:
        if not self._changed.wait_for(lambda: self._is_over or is_there(), seconds):
            raise TransferFailed(f"the file did not grow for {seconds:g} s")
        if self._is_over:
            raise TransferFailed("the version is given up")
