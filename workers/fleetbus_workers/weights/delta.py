"""A version of the weights as its difference to the version before: a safetensors file that names its base.

Worth it when few bytes change: adapters leave most tensors alone, and in bfloat16 a small step leaves most numbers alone. Per
tensor: nothing if it is equal, places and values if few numbers changed, else all of it. The result is bit for bit the new
version, and is checked against its manifest like any other file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from fleetbus_workers.weights.file import WeightsRejected, fsync_path, save_tensors

if TYPE_CHECKING:
    import torch

BASE = "fleetbus_base"
"""Metadata of a delta file: where the version is that it is a difference to."""

_PLACES, _VALUES, _WHOLE = "places:", "values:", "whole:"
MAX_CHANGED_SHARE = 0.25
"""More changed numbers than this, and a tensor travels whole: a place costs as much as one or two numbers."""


def write_delta(file: Path, *, base: Path, new: Path, base_uri: str) -> int:
    """Write the difference of two weights files and return its size in bytes; atomic. Raises `OSError`."""
    from safetensors import safe_open

    parts: dict[str, torch.Tensor] = {}
    with safe_open(base, framework="pt") as before, safe_open(new, framework="pt") as after:
        known = set(before.keys())
        for name in after.keys():
            parts |= _compute_difference(name, before.get_tensor(name) if name in known else None, after.get_tensor(name))
    temporary = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        save_tensors(parts, temporary, {BASE: base_uri})
        fsync_path(temporary, os.O_RDWR)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file.stat().st_size


def write_smaller(file: Path, *, base: Path, base_uri: str) -> Path:
    """The difference of ``file`` to ``base``, written beside it, or ``file`` itself where that is no larger."""
    delta = file.with_suffix(".delta")
    if write_delta(delta, base=base, new=file, base_uri=base_uri) < file.stat().st_size:
        return delta
    delta.unlink()
    return file


def read_base_uri(file: Path) -> str | None:
    """The URI of the base of a delta file, None if the file is a whole version. Raises `WeightsRejected`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            return (stored.metadata() or {}).get(BASE)
    except (OSError, SafetensorError) as error:
        raise WeightsRejected(f"{file}: cannot be read: {error}") from error


def apply_delta(delta: Path, *, base: Path, file: Path) -> None:
    """Write base and difference together as a whole version; raises `WeightsRejected` if they do not fit, or `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors, parts = load_file(base), load_file(delta)
        for key, part in parts.items():
            kind, _, name = key.partition(":")
            if kind == "whole":
                tensors[name] = part
            elif kind == "values":
                tensors[name].view(-1).index_put_((parts[_PLACES + name].long(),), part)
    except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
        raise WeightsRejected(f"{delta}: does not fit its base {base.name}: {error}") from error
    temporary = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        save_tensors(tensors, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _compute_difference(name: str, before: torch.Tensor | None, after: torch.Tensor) -> dict[str, torch.Tensor]:
    import torch

    if before is None or before.shape != after.shape or before.dtype != after.dtype:
        return {_WHOLE + name: after}
    # Compared as bytes: -0.0 is not 0.0 and a NaN is itself, or the hash would not be that of the manifest.
    width = after.element_size()
    changed = (before.reshape(-1).view(torch.uint8) != after.reshape(-1).view(torch.uint8)).view(-1, width).any(-1)
    places = torch.nonzero(changed)[:, 0]
    if not len(places):
        return {}
    if len(places) > MAX_CHANGED_SHARE * after.numel() or after.numel() >= 2**31:
        return {_WHOLE + name: after}
    return {_PLACES + name: places.to(torch.int32), _VALUES + name: after.reshape(-1)[places].contiguous()}
