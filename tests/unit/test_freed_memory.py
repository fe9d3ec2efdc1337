"""Memory that a step has freed goes back to the system, so that a learner does not grow with every other batch."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from fleetbus_workers import freed_memory
from fleetbus_workers.freed_memory import _count_resident_bytes, _find_trim, return_freed_memory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux") or _find_trim() is None, reason="glibc alone keeps it")

BLOCK = 64 << 10
"""Below what glibc maps from the system and gives back by itself."""

COUNT = 3000


def leave_holes() -> list[int]:
    """Blocks of memory of which every other one has been freed; the others."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[::2]:
        library.free(block)
    return blocks[1::2]


@pytest.mark.parametrize("said", ["", "0", "garbage x y"])
def test_a_system_that_says_nothing_of_a_process_ends_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(freed_memory, "STATUS", tmp_path / "statm")
    return_freed_memory()
    (tmp_path / "statm").write_text(said)
    return_freed_memory()


def test_freed_memory_goes_back_to_the_system() -> None:
    kept = leave_holes()
    before = _count_resident_bytes()
    return_freed_memory(before)
    assert before - _count_resident_bytes() < COUNT * BLOCK / 20, "a process below the limit keeps what it has"
    return_freed_memory(0)
    freed = before - _count_resident_bytes()
    for block in kept:
        ctypes.CDLL(None).free(ctypes.c_void_p(block))
    assert freed > COUNT * BLOCK / 4
