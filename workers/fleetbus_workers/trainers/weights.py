"""The weights that a trainer of others sends after its steps, kept as one file, of which versions are made."""

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog

from fleetbus.errors import is_disk_full
from fleetbus_schemas import TensorEntry
from fleetbus_workers.learner.disk_full import RETRY_SECONDS
from fleetbus_workers.weights.file import stream_weights

if TYPE_CHECKING:
    import torch

_PREFIX = ".sent-"

HEADER_BYTES = 1 << 20
"""More than the beginning of a file has beside the tensors."""

log = structlog.get_logger()


class SentWeights:
    """The newest of them, in ``folder``, where versions are published from. Methods block, and may be called in any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = uuid4().hex
        self._began = time.time()
        self._layout: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        self._lock = threading.Lock()
        self._newest: tuple[Path, tuple[TensorEntry, ...]] | None = None
        self._is_published = False

    def write(self, tensors: Iterable[tuple[str, "torch.Tensor"]], *, check: Callable[[], object] | None = None) -> None:
        """Keep these instead of those before. One at a time is held in this machine's memory; the first time of an iterator all
        are, for their shapes. With ``check`` a full disk is waited for, as long as that raises nothing. Raises `OSError`, or
        `ValueError` if names or shapes have changed."""
        if not self._layout:
            self._folder.mkdir(parents=True, exist_ok=True)
            if isinstance(tensors, Iterator):  # each may be gone once the next one is made
                tensors = [(name, tensor.detach().cpu()) for name, tensor in tensors]
            self._layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
        file = self._folder / f"{_PREFIX}{self._owner}-{uuid4().hex}.safetensors"
        if check is not None:
            self._wait_for_room(check)
        try:
            manifest = stream_weights(file, self._layout, tensors)
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)}: free space there and start again", str(self._folder)
            ) from error
        with self._lock:
            before, self._newest = self._newest, (file, manifest)
        if before is not None:
            before[0].unlink(missing_ok=True)

    def _wait_for_room(self, check: Callable[[], object]) -> None:
        """Before the first of them is taken: an iterator that has begun cannot be begun anew."""
        needed = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self._layout) + HEADER_BYTES
        while (free := shutil.disk_usage(self._folder).free) < needed:
            log.error("disk is full; waiting for free space", folder=str(self._folder), free_bytes=free, needed_bytes=needed)
            check()
            time.sleep(RETRY_SECONDS)

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """See `SavesWeights.save_weights`: the newest get a second name. Raises `OSError`."""
        if not self._is_published:
            self._is_published = True
            self._remove_left()
        with self._lock:
            if self._newest is None:
                raise FileNotFoundError("the trainer has sent no weights")
            newest, manifest = self._newest
            temporary = file.with_name(f".{file.name}.{uuid4().hex}")
            os.link(newest, temporary)
        temporary.replace(file)
        return manifest

    def _remove_left(self) -> None:
        """Remove what killed processes left, half written too: whoever published before is refused by now. What is newer may be
        of somebody who has replaced this one, and publishes it."""
        for left in (*self._folder.glob(f"{_PREFIX}*"), *self._folder.glob(f".{_PREFIX}*")):
            with suppress(FileNotFoundError):
                if self._owner not in left.name and left.stat().st_mtime < self._began:
                    left.unlink()

    def clear(self) -> None:
        """Remove what is kept; published versions stay."""
        with self._lock:
            if self._newest is not None:
                self._newest[0].unlink(missing_ok=True)
