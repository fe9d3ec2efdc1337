"""A version of the weights as one safetensors file: written atomically by a trainer, checked wholly by an engine.

Shared by learner and inference, which must not import each other. Torch is imported only when a file is written or read, so
that engines without torch can name `WeightsRejected`. Nothing here ever returns tensors that were not checked.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from fleetbus_schemas import TensorEntry
from fleetbus_workers.weights.content import CHECKED, ContentCheck, check_content, map_in_threads

if TYPE_CHECKING:
    import torch


MAX_HEADER_BYTES = 100 << 20
"""Of a safetensors file; its library reads no longer ones."""


STEP_BYTES = 8 << 20
"""Written before a watcher is told: a tensor of gigabytes takes a slow disk longer than one who waits for it may wait."""


class WeightsRejected(Exception):
    """A published version failed validation (names, shapes, dtype, hash, finiteness); the engine still has the old one."""


class WritingWatcher(Protocol):
    """Follows a weights file while it is written, told by the thread that writes. A file that is begun anew is another one."""

    def begin(self, file: Path, size: int) -> None:
        """``file``, whose name will change, will have ``size`` bytes. Raises `OSError`."""

    def advance(self, position: int) -> None:
        """All bytes before ``position`` can be read, and will not change."""

    def give_up(self) -> None:
        """The file will not become whole."""


def unique_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without later names of the same memory: tied weights keep their first name only."""
    seen: set[tuple[object, ...]] = set()
    unique: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in seen:
            seen.add(place)
            unique[name] = tensor
    return unique


def write_weights(
    file: Path, tensors: Mapping[str, torch.Tensor], watcher: WritingWatcher | None = None
) -> tuple[TensorEntry, ...]:
    """Write ``tensors`` to ``file`` as safetensors and return the manifest, one entry per tensor written, in their order.

    Tied tensors are written once, under their first name. Otherwise as `stream_weights`.
    """
    stored = unique_tensors(tensors)
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()]
    return stream_weights(file, layout, stored.items(), watcher)


def stream_weights(
    file: Path,
    layout: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    watcher: WritingWatcher | None = None,
) -> tuple[TensorEntry, ...]:
    """Write a safetensors file tensor by tensor, hashing each as it is written, and return the manifest in the order of
    ``layout`` (names, shapes, types). ``tensors`` come in any order, and no more than one is held. ``watcher`` follows.

    A reader of ``file`` finds the old content, nothing, or all of it: a temporary file in the same folder is written, synced
    and renamed. Raises `OSError`, or `ValueError` if ``tensors`` are not those of ``layout``.
    """
    header, offsets = _build_header(layout)
    hashes: dict[str, str] = {}
    temporary = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        with temporary.open("wb") as output:
            output.write(header)
            told = _Told(watcher, output, temporary, header, offsets)
            for name, tensor in tensors:
                content = view_bytes(tensor)
                if (offset := offsets.get(name)) is None or offset[1] - offset[0] != len(content):
                    raise ValueError(f"{file}: {name} is not what was announced")
                output.seek(len(header) + offset[0])
                digest = hashlib.sha256()
                for start in range(0, len(content), STEP_BYTES):
                    piece = content[start : start + STEP_BYTES]
                    output.write(piece)
                    told.record_written(offset[0] + start, offset[0] + start + len(piece))
                    digest.update(piece)
                hashes[name] = digest.hexdigest()
            if missing := offsets.keys() - hashes.keys():
                raise ValueError(f"{file}: {len(missing)} tensors never came: {min(missing)}")
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, file)
    except BaseException:
        if watcher is not None:
            watcher.give_up()
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(file.parent, os.O_RDONLY)
    names = _map_dtype_names()
    return tuple(TensorEntry(name=name, shape=shape, dtype=names[dtype], sha256=hashes[name]) for name, shape, dtype in layout)


class _Told:
    """Tells a watcher how far a file is written without holes: tensors may come in any order."""

    def __init__(
        self,
        watcher: WritingWatcher | None,
        output: BinaryIO,
        file: Path,
        header: bytes,
        offsets: Mapping[str, tuple[int, int]],
    ) -> None:
        self._watcher, self._output, self._base = watcher, output, len(header)
        self._ahead: dict[int, int] = {}
        self._reached = 0
        if watcher is not None:
            watcher.begin(file, len(header) + max((stop for _, stop in offsets.values()), default=0))

    def record_written(self, start: int, stop: int) -> None:
        if self._watcher is None:
            return
        self._ahead[start] = stop
        while self._reached in self._ahead:
            self._reached = self._ahead.pop(self._reached)
        self._output.flush()
        self._watcher.advance(self._base + self._reached)


def _build_header(layout: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A safetensors file's beginning, and where the bytes of each tensor stand behind it. Larger types stand first, so that
    each tensor is aligned to its own; otherwise the order is that of ``layout``, so that a file that is written in this order
    grows without holes."""
    names = _map_dtype_names()
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, shape, dtype in sorted(layout, key=lambda each: -each[2].itemsize):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        offsets[name] = (start, end)
        described[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(described, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return struct.pack("<Q", len(content)) + content, offsets


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, not atomically. Raises `OSError`, where the library's own error only states its number."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(file)) from error


def expect_file(file: Path) -> None:
    """Raises `WeightsRejected` for what is there and no file: a pipe would be waited for without end. Also raises `OSError`."""
    if file.exists() and not file.is_file():
        raise WeightsRejected(f"{file}: is not a regular file")


def read_weights(location: str | Path, manifest: Sequence[TensorEntry], *, mapped: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a weights file (a path or a ``file://`` URI) on the CPU, exactly those that ``manifest`` lists.

    They are copies, which no later change of the file reaches. ``mapped`` ones take no memory and are the file itself, whoever
    writes into it later: for who lets another program read that file.

    Raises `WeightsRejected`, in one line that names the file and the first thing wrong: missing or unreadable file, names,
    shapes, dtypes or hashes that differ from the manifest, values that are not finite.
    """
    from safetensors import SafetensorError, safe_open

    file = _parse_location(location)
    try:
        expect_file(file)
        with safe_open(file, framework="pt", device="cpu") as stored:
            _check_names(file, list(stored.keys()), manifest)
            tensors = {entry.name: _read_tensor(file, stored, entry, mapped=mapped) for entry in manifest}
    except (OSError, SafetensorError) as error:
        raise WeightsRejected(f"{file}: cannot be read: {error}") from error
    checks = map_in_threads(lambda entry: check_content(entry.dtype, view_bytes(tensors[entry.name])), manifest)
    for entry, check in zip(manifest, checks, strict=True):
        expect_content(str(file), entry, check)
    return tensors


def _read_tensor(file: Path, stored: Any, entry: TensorEntry, *, mapped: bool) -> torch.Tensor:
    header = stored.get_slice(entry.name)
    expect_kind(str(file), entry, tuple(header.get_shape()), header.get_dtype())
    tensor: torch.Tensor = stored.get_tensor(entry.name)
    return tensor if mapped else tensor.clone()


def expect_kind(what: str, entry: TensorEntry, shape: tuple[int, ...], dtype: str) -> None:
    """Raise `WeightsRejected` if a tensor of ``what`` has not its entry's shape and dtype, or none that can be checked."""
    if shape != entry.shape:
        raise WeightsRejected(f"{what}: {entry.name} has shape {list(shape)}, the manifest says {list(entry.shape)}")
    if dtype != entry.dtype:
        raise WeightsRejected(f"{what}: {entry.name} is {dtype}, the manifest says {entry.dtype}")
    if dtype not in CHECKED:
        raise WeightsRejected(f"{what}: {entry.name} is {dtype}, which cannot be checked for finite values")


def expect_content(what: str, entry: TensorEntry, check: ContentCheck) -> None:
    """Raise `WeightsRejected` if the bytes of a tensor are not those of its entry, or not all finite."""
    if check.sha256 != entry.sha256:
        raise WeightsRejected(f"{what}: {entry.name} differs from the manifest's sha256")
    if not check.is_finite:
        raise WeightsRejected(f"{what}: {entry.name} has values that are not finite")


def _check_names(file: Path, found: Sequence[str], manifest: Sequence[TensorEntry]) -> None:
    expected = {entry.name for entry in manifest}
    if not manifest or len(expected) != len(manifest):
        raise WeightsRejected(f"{file}: the manifest is empty or names a tensor twice")
    check_names(str(file), set(found), expected)


def check_names(what: str, found: set[str], expected: set[str]) -> None:
    """Raise `WeightsRejected` naming up to three tensors that ``what`` lacks or has too many."""
    for kind, names in (("lacks", expected - found), ("has unknown", found - expected)):
        if names:
            listed = ", ".join(sorted(names)[:3])
            raise WeightsRejected(f"{what}: {kind} {len(names)} of {len(expected)} tensors: {listed}")


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, copied only if it is not on the CPU or not contiguous."""
    import torch

    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _map_dtype_names() -> dict[torch.dtype, str]:
    import torch

    return {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }


def map_dtypes() -> dict[str, torch.dtype]:
    """Types that are published, by their name in a weights file."""
    return {name: dtype for dtype, name in _map_dtype_names().items()}


def _parse_location(location: str | Path) -> Path:
    if isinstance(location, Path) or "://" not in location:
        return Path(location)
    parts = urlsplit(location)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise WeightsRejected(f"{location}: only paths and file:// URIs can be read")
    return Path(unquote(parts.path))


def fsync_path(path: Path, flags: int) -> None:
    """Force a file or folder to the disk; ``flags`` are those that it is opened with."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
