"""Token arrays as bytes: ids little-endian ``u4``, log-probabilities little-endian ``f4``, masks packed bits.

NumPy reads them without a copy: ``np.frombuffer(ids, "<u4")``, ``np.frombuffer(logprobs, "<f4")``,
``np.unpackbits(mask, count=n, bitorder="little")``. This module needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

TOKEN_BYTES = 4
"""Bytes per token id and per log-probability."""

EMPTY_HISTORY = b""
"""History hash of an episode before its first action."""


def _to_bytes(kind: str, values: Iterable[int] | Iterable[float]) -> bytes:
    packed = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _from_bytes(kind: str, data: bytes) -> array[int] | array[float]:
    unpacked: array[int] | array[float] = array(kind)
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids (each in ``[0, 2**32)``) as little-endian ``u4``."""
    return _to_bytes("I", ids)


def unpack_ids(data: bytes) -> list[int]:
    """Token ids from little-endian ``u4``; raises `ValueError` when the length is no multiple of four."""
    return _from_bytes("I", data).tolist()  # type: ignore[return-value]


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Natural log-probabilities as little-endian ``f4``."""
    return _to_bytes("f", logprobs)


def unpack_logprobs(data: bytes) -> list[float]:
    """Natural log-probabilities from little-endian ``f4``."""
    return _from_bytes("f", data).tolist()  # type: ignore[return-value]


def pack_mask(mask: Sequence[bool]) -> bytes:
    """A mask as packed bits, first element in the lowest bit of the first byte."""
    size = (len(mask) + 7) // 8
    flags = bytes(mask).ljust(8 * size, b"\0")
    packed = 0
    for bit in range(8):
        packed |= int.from_bytes(flags[bit::8], "little") << bit
    return packed.to_bytes(size, "little")


def unpack_mask(data: bytes, count: int) -> list[bool]:
    """The first ``count`` elements of a packed mask."""
    return [bool(data[index >> 3] >> (index & 7) & 1) for index in range(count)]


def count_tokens(data: bytes) -> int:
    """Number of tokens in packed ids or packed log-probabilities."""
    return len(data) // TOKEN_BYTES


def take_tokens(packed: bytes, most: int) -> bytes:
    """The first ``most`` of packed values, to be shown; what is no whole value at the end is left out."""
    return packed[: TOKEN_BYTES * min(count_tokens(packed), most)]


def extend_history(history: bytes, prompt_delta: bytes, sampled: bytes, images: Sequence[str] = ()) -> bytes:
    """Hash of a token history after one more turn: BLAKE2b-128 over the previous hash and the turn's packed ids.

    ``history`` is `EMPTY_HISTORY` before the first turn; lengths are hashed too, so that turns cannot be shifted. ``images``
    are the names of those that the turn shows: the same ids stand for any image of one size.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(history)
    digest.update(len(prompt_delta).to_bytes(8, "little"))
    digest.update(prompt_delta)
    digest.update(sampled)
    for image in images:
        digest.update(b"image" + image.encode())
    return digest.digest()


def start_history(kept: bytes, images: Sequence[str] = ()) -> bytes:
    """Hash that the chain of a segment begins with: of the packed ids that it keeps of its parent and the names of the images
    that they show; `EMPTY_HISTORY` if it keeps nothing."""
    return extend_history(EMPTY_HISTORY, kept, b"", images) if kept else EMPTY_HISTORY
