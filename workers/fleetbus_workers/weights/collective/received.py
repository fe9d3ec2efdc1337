"""A version in an engine's memory as it arrives: its tensors, their digests, and the comparison with the manifest in the log.

What arrives comes from whoever found the port: sizes and types are checked before they are used, and no tensor leaves here
that does not have the name, shape, type and digest that the log has for it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from fleetbus_schemas import TensorEntry
from fleetbus_workers.weights.content import CHECKED, ContentCheck
from fleetbus_workers.weights.file import MAX_HEADER_BYTES, check_names, expect_content, expect_kind, map_dtypes, view_bytes
from fleetbus_workers.weights.transfer import TransferFailed

_LENGTH = struct.Struct("<Q")


class _Part:
    """One tensor: where its bytes are, [start, stop) of the file, and what was found of them up to ``checked``."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> None:
        self.name, self.dtype, self.shape, self.start, self.stop = name, dtype, shape, start, stop
        self.check = ContentCheck(dtype)
        self.checked = start


class ReceivedVersion:
    """``content`` uint8 [bytes of the file], filled from the front by whoever receives it."""

    def __init__(self, content: torch.Tensor) -> None:
        self._content = content
        self._bytes = view_bytes(content)
        self._parts: list[_Part] | None = None
        self._open = 0

    def advance(self, arrived: int) -> None:
        """Take the bytes before ``arrived`` into the digests. Raises `TransferFailed` if they begin no weights file."""
        if self._parts is None:
            self._parts = self._read_header(arrived)
        while self._parts is not None and self._open < len(self._parts):
            part = self._parts[self._open]
            stop = min(part.stop, arrived)
            if stop > part.checked:
                part.check.update(self._bytes[part.checked : stop])
                part.checked = stop
            if part.checked < part.stop:
                return
            self._open += 1

    def take_tensors(self, what: str, manifest: Sequence[TensorEntry]) -> dict[str, torch.Tensor]:
        """All tensors, which share the memory of ``content``, if they are those of ``manifest``. Raises
        `fleetbus_workers.weights.file.WeightsRejected`."""
        parts = {part.name: part for part in self._parts or ()}
        check_names(what, set(parts), {entry.name for entry in manifest})
        types = map_dtypes()
        tensors = {}
        for entry in manifest:
            part = parts[entry.name]
            expect_kind(what, entry, part.shape, part.dtype)
            expect_content(what, entry, part.check)
            tensors[entry.name] = self._content[part.start : part.stop].view(types[part.dtype]).view(part.shape)
        return tensors

    def _read_header(self, arrived: int) -> list[_Part] | None:
        if arrived < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(self._bytes[: _LENGTH.size])
        begins = _LENGTH.size + length
        if length > MAX_HEADER_BYTES or begins > len(self._bytes) or length % _LENGTH.size:
            raise TransferFailed(f"a header of {length} bytes was announced")
        if arrived < begins:
            return None
        try:
            described = json.loads(bytes(self._bytes[_LENGTH.size : begins]))
            described.pop("__metadata__", None)
            found = [_parse_part(name, entry, begins) for name, entry in described.items()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TransferFailed("what arrived is no weights file") from error
        parts = sorted(found, key=lambda part: (part.start, part.stop))
        ends = [begins, *(part.stop for part in parts)]
        if [part.start for part in parts] != ends[:-1] or ends[-1] != len(self._bytes):
            raise TransferFailed("the tensors of what arrived do not fill it")
        return parts


def _parse_part(name: str, entry: dict[str, Any], begins: int) -> _Part:
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in CHECKED or not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
        raise ValueError(name)
    itemsize = map_dtypes()[dtype].itemsize
    if stop - start != math.prod(shape) * itemsize or (begins + start) % itemsize:
        raise ValueError(name)
    return _Part(name, dtype, tuple(shape), begins + start, begins + stop)
