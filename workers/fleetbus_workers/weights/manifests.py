"""Manifests that are too long for their message: objects of the run's bucket, named by their hash (DESIGN §4).

A mixture of experts has tens of thousands of tensors, a manifest 150 bytes for each, and a message 1 MiB in all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import anyio
import msgspec

from fleetbus.bus.objects import ObjectStore
from fleetbus_schemas import PolicyPublished, TensorEntry

MAX_MANIFEST_BYTES = 256 << 10
"""Of the manifest's JSON; what is longer does not travel in the message."""

Manifest = tuple[TensorEntry, ...]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Manifest).decode


async def put_manifest(objects: ObjectStore | None, manifest: Manifest, folder: Path) -> str:
    """Store a manifest that is too long and return the object's name; empty if it is not, or there is no store.

    ``folder`` takes a file meanwhile. Raises `OSError` or `fleetbus.errors.BusError`.
    """
    content = _encode(manifest)
    if objects is None or len(content) <= MAX_MANIFEST_BYTES:
        return ""
    name = hashlib.sha256(content).hexdigest()
    file = anyio.Path(folder) / f".{name}.json"
    try:
        await file.write_bytes(content)
        await objects.put(name, Path(file))
    finally:
        with anyio.CancelScope(shield=True):
            await file.unlink(missing_ok=True)
    return name


async def get_manifest(objects: ObjectStore, published: PolicyPublished, folder: Path) -> PolicyPublished:
    """The version with its manifest in the message. ``folder`` takes a file meanwhile.

    Raises `fleetbus.bus.objects.ObjectMissing`, `OSError`, `ValueError` or `fleetbus.errors.BusError`.
    """
    name = published.manifest_object
    file = anyio.Path(folder) / f".{name}.json"
    await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        await objects.get(name, Path(file))
        content = await file.read_bytes()
    finally:
        with anyio.CancelScope(shield=True):
            await file.unlink(missing_ok=True)
    if hashlib.sha256(content).hexdigest() != name:
        raise ValueError(f"manifest {name} is not what its name says")
    return inline_manifest(published, {name: content})


def inline_manifest(published: PolicyPublished, objects: Mapping[str, bytes]) -> PolicyPublished:
    """The version with its manifest in the message; unchanged where it is there already, or is not among ``objects``.

    Raises `msgspec.DecodeError`, a `ValueError`.
    """
    content = objects.get(published.manifest_object)
    if published.manifest or content is None:
        return published
    return msgspec.structs.replace(published, manifest=_decode(content), manifest_object="")
