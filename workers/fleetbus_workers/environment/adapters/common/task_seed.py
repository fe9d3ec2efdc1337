"""The seed of all that is chance in a task."""

from __future__ import annotations

import zlib

from fleetbus_schemas import Task


def find_seed(task: Task) -> int:
    """The task's own seed, else one that follows from its key: each attempt has the same."""
    return task.seed if task.seed is not None else zlib.crc32(task.key.encode())
