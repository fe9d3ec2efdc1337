"""A version of the policy: where its weights are and how to check them. Never the weights themselves."""

from __future__ import annotations

import msgspec

from fleetbus_schemas.message import Message
from fleetbus_schemas.names import Name


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tensor of a weights file: its name, shape, dtype (safetensors spelling, e.g. ``F32``) and SHA-256 (hex)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str


class PolicyPublished(Message, frozen=True, kw_only=True):
    """Learner → inference workers, on ``policy.<name>``, expecting the last entry there. Versions never repeat.

    A manifest too long to travel is empty here and ``manifest_object`` the SHA-256 (hex) of its JSON in the object bucket.
    Requests may name one of the newest ``window`` versions as an opponent; 0: none. On the subject of a league's own policy
    stands the run's first version with it, once.
    """

    policy: Name
    version: int
    lineage: str
    step: int
    uri: str
    manifest: tuple[TensorEntry, ...]
    size_bytes: int
    manifest_object: str = ""
    window: int = 0


class WeightsOffered(Message, frozen=True, kw_only=True):
    """Learner → inference workers, on ``fbwt.<run>.<policy>``; a core message, not stored: who misses it reads the file.

    The version ``version`` of ``lineage`` is being written, and who connects to ``address``:``port`` in time gets its bytes at
    once. ``token`` names this offer there. It counts only when `PolicyPublished` names the same version and digests.
    """

    policy: str
    version: int
    lineage: str
    address: str
    port: int
    token: str
