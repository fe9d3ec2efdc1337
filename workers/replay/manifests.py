"""Manifests that were too long for their message, put back into it from the recorded objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from schemas import PolicyPublished, TensorEntry

_decode = msgspec.json.Decoder(tuple[TensorEntry, ...]).decode


def with_manifest(published: PolicyPublished, objects: Mapping[str, bytes]) -> PolicyPublished:
    """The version with its manifest in the message; unchanged where it is there already, or was not recorded."""
    content = objects.get(published.manifest_object)
    if published.manifest or content is None:
        return published
    return msgspec.structs.replace(published, manifest=_decode(content), manifest_object="")
