"""Freed tensors that the C library's allocator keeps go back to the system.

A batch's lengths differ from those of the one before, so that few of its tensors fit where others were; threads have heaps of
their own besides. Without this the learner of SmolLM2-135M grew from 4.5 to 11.6 GB in five steps (docs/decisions/0258).
"""

import ctypes
import os
from functools import cache
from pathlib import Path

MOST_KEPT_BYTES = 1 << 31
"""Resident memory below which nothing is given back: it would be asked for again in the next step."""

STATUS = Path("/proc/self/statm")


def return_freed_memory(above: int = MOST_KEPT_BYTES) -> None:
    """Give freed memory back if this process has more than ``above`` bytes in memory; nothing where the system cannot say so
    or the C library is another than glibc."""
    trim = _find_trim()
    if trim is not None and _count_resident_bytes() > above:
        trim(0)


@cache
def _find_trim() -> "ctypes._NamedFuncPointer | None":
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None


def _count_resident_bytes() -> int:
    try:
        return int(STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
