"""Checks the addresses of versions and checkpoints: each is called as it is numbered, beside the others of its lineage. Pure.

A learner keeps its folders and its store as long as it lives. Whether the files hold what they are said to hold is no matter of
the log: weights are checked by their manifest when they are loaded, checkpoints by the digest of their index.
"""

import msgspec

from fleetbus_schemas import CheckpointStored, PolicyPublished

_SUFFIXES = (".safetensors", ".delta")


class Addresses(msgspec.Struct):
    """By policy and lineage the place of its first version and of its first checkpoint."""

    _versions: dict[tuple[str, str], str] = {}
    _checkpoints: dict[tuple[str, str], str] = {}

    def is_version_right(self, published: PolicyPublished, *, again: bool = False) -> bool:
        """True if this version is where it may be; ``again``: it is one of a lineage whose place is known. One without an
        address is nowhere; an object of a bucket that several policies have is named by its policy, too."""
        if not published.uri:
            return True
        place, _, name = published.uri.rpartition("/")
        names = [f"{published.lineage}-v{published.version:06d}{suffix}" for suffix in _SUFFIXES]
        is_named = name in names or name.removeprefix(f"{published.policy}-") in names
        of = (published.policy, published.lineage)
        return is_named and (self._versions.get(of) if again else self._versions.setdefault(of, place)) == place

    def is_checkpoint_right(self, policy: str, stored: CheckpointStored) -> bool:
        """True if this checkpoint of the policy's learner is where it may be."""
        if not stored.file:
            return True
        place, _, name = stored.file.rpartition("/")
        is_named = name == f"{stored.lineage}-{stored.step:06d}"
        return is_named and self._checkpoints.setdefault((policy, stored.lineage), place) == place
