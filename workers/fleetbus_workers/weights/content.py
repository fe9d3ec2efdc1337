"""Digest and finiteness of a tensor's bytes in one pass: each piece is looked at while the processor's cache has it.

Infinity and NaN are those floating point numbers whose exponent is all ones, so that a comparison of whole numbers finds them:
`torch.isfinite` reads and writes memory several times for each number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from fleetbus.processors import count_processors

T = TypeVar("T")
R = TypeVar("R")

_EXPONENTS: dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.int64, np.uint64, 0x7FF0 << 48),
    "F32": (np.int32, np.uint32, 0x7F80 << 16),
    "BF16": (np.int16, np.uint16, 0x7F80),
    "F16": (np.int16, np.uint16, 0x7C00),
}
"""By dtype (safetensors spelling) the whole numbers of its size, and its pattern of infinity: all finite numbers are below."""

_WHOLE_NUMBERS = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})

CHECKED = frozenset(_EXPONENTS) | _WHOLE_NUMBERS
"""Types that can be checked for finite values."""

_PIECE_BYTES = 1 << 18
MAX_THREADS = 8
"""Threads of one check; half of the processors at most, because the engine samples meanwhile."""


class ContentCheck:
    """Takes the bytes of one tensor of ``dtype`` (one of `CHECKED`) in order."""

    def __init__(self, dtype: str) -> None:
        self._digest = hashlib.sha256()
        self._patterns = _EXPONENTS.get(dtype)
        self.is_finite = True

    def update(self, content: memoryview) -> None:
        """Take the next bytes, whole numbers of the tensor's and C-contiguous."""
        view = content.cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._digest.update(piece)
            if self._patterns is not None and self.is_finite:
                signed, unsigned, infinity = self._patterns
                # The largest pattern by either reading is that of the largest positive and of the largest negative number.
                largest = int(np.frombuffer(piece, signed).max())
                self.is_finite = largest < infinity and int(np.frombuffer(piece, unsigned).max()) < infinity + _sign(unsigned)

    @property
    def sha256(self) -> str:
        """Of what was taken so far, hex."""
        return self._digest.hexdigest()


def _sign(unsigned: type[np.unsignedinteger[Any]]) -> int:
    """The bit of the sign in a pattern of this type."""
    return 1 << (8 * np.dtype(unsigned).itemsize - 1)


def check_content(dtype: str, content: memoryview) -> ContentCheck:
    """The check of all bytes of a tensor."""
    check = ContentCheck(dtype)
    check.update(content)
    return check


def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results in the order of ``items``, computed by `MAX_THREADS` threads at most; hashing and comparing leave the
    interpreter's lock. Raises what the first of them raises."""
    count = min(MAX_THREADS, count_processors() // 2, len(items))
    if count < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count, thread_name_prefix="weights-check") as pool:
        return list(pool.map(function, items))
