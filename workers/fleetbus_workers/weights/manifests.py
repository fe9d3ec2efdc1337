"""Manifests that are too long for their message: objects of the run's bucket, named by their hash (docs/concepts/log.md).

A mixture of experts has tens of thousands of tensors, a manifest 150 bytes for each, and a message 1 MiB in all.
"""

from collections.abc import Mapping

import msgspec

from fleetbus.bus.objects import ObjectStore, get_content, put_content
from fleetbus_schemas import PolicyPublished, TensorEntry

MAX_MANIFEST_BYTES = 256 << 10
"""Of the manifest's JSON; what is longer does not travel in the message."""

Manifest = tuple[TensorEntry, ...]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Manifest).decode


async def put_manifest(objects: ObjectStore | None, manifest: Manifest) -> str:
    """Store a manifest that is too long and return the object's name; empty if it is not, or there is no store.

    Raises `OSError` or `fleetbus.errors.BusError`.
    """
    content = _encode(manifest)
    if objects is None or len(content) <= MAX_MANIFEST_BYTES:
        return ""
    return await put_content(objects, content)


async def get_manifest(objects: ObjectStore, published: PolicyPublished) -> PolicyPublished:
    """The version with its manifest in the message.

    Raises `fleetbus.bus.objects.ObjectMissing`, `ValueError` or `fleetbus.errors.BusError`.
    """
    name = published.manifest_object
    return inline_manifest(published, {name: await get_content(objects, name)})


def inline_manifest(published: PolicyPublished, objects: Mapping[str, bytes]) -> PolicyPublished:
    """The version with its manifest in the message; unchanged where it is there already, or is not among ``objects``.

    Raises `msgspec.DecodeError`, a `ValueError`.
    """
    content = objects.get(published.manifest_object)
    if published.manifest or content is None:
        return published
    return msgspec.structs.replace(published, manifest=_decode(content), manifest_object="")
