"""Published versions of a policy, as an audit knows them. Pure; the audit's state holds it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MAX_VERSIONS = 1 << 14
"""Newest versions of a policy that are known one by one."""


class PolicyVersions(msgspec.Struct):
    """Published versions of one policy with the step that made each; old ones are known by being below the newest.

    ``void`` are those of steps that a later lineage went back behind. ``begins_anywhere``: the log's beginning was removed, so
    that the first version that is read has others before it.
    """

    begins_anywhere: bool = False
    _known: dict[int, int] = {}
    void: set[int] = set()
    _oldest: int = 0
    _forgotten: int = 0
    is_league: bool = False
    """Nothing is published under this name but once the first version of another policy."""

    def __contains__(self, version: object) -> bool:
        if not self._known and self.begins_anywhere:
            return True
        return version in self._known or (isinstance(version, int) and 0 <= version < self._oldest)

    def repeats(self, version: int) -> bool:
        """True if this version was published before; the first that can be read was not, as far as can be told."""
        return bool(self._known or not self.begins_anywhere) and version in self

    def __len__(self) -> int:
        return len(self._known) + self._forgotten

    @property
    def unread_below(self) -> int:
        """Versions below it were published before the log begins."""
        return self._oldest if self.begins_anywhere else 0

    @property
    def steps(self) -> Mapping[int, int]:
        return self._known

    def add(self, version: int, step: int) -> bool:
        """False under the name of a league, which has no versions of its own."""
        if not self._known and self.begins_anywhere:
            self._oldest = version
        self._known[version] = step
        return not self.is_league

    def name_first(self) -> bool:
        """True the first time, if nothing of its own was published under this name."""
        if self.is_league or self._known:
            return False
        self.is_league = True
        return True

    def made(self, version: int, step: int) -> bool:
        """True if it was published, and made by this step as far as is known."""
        return version in self and self._known.get(version, step) == step

    def go_back(self, step: int) -> None:
        """A lineage begins after ``step``: what the one before it made later is void."""
        self.void.update(version for version, made in self._known.items() if made > step)

    def forget_old(self) -> None:
        if len(self._known) > 2 * MAX_VERSIONS:
            kept = sorted(self._known)[-MAX_VERSIONS:]
            self._forgotten += len(self._known) - len(kept)
            self._known, self._oldest = {version: self._known[version] for version in kept}, kept[0]
            self.void.intersection_update(kept)
