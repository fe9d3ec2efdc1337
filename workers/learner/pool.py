"""Groups between their request and their batch: which are out, which are ready, which must be discarded.

The worker feeds results in and takes batches out. Everything here is bounded by the admission rule.
"""

from __future__ import annotations

import anyio

from fleetbus.core.capacity import lag
from fleetbus.core.groups import Group
from fleetbus.core.ledger import Ledger
from schemas import EpisodeFinished, Exclusion


class GroupPool:
    """Admitted groups by id. ``settled`` decides what counts; a result of an unknown episode is none of ours."""

    def __init__(self, ledger: Ledger, *, minimum: int, max_staleness: int, drop_late: bool) -> None:
        self._ledger = ledger
        self._minimum = minimum
        self._max_staleness = max_staleness
        self._drop_late = drop_late
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}
        self._excluded: list[Exclusion] = []
        self._step_of: dict[int, int] = {}
        self.published_step = -1
        """Steps behind the version that was published last."""
        self.changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def admit(self, group_id: str, size: int) -> Group:
        """Enter a group of which ``size`` episodes are requested."""
        return self._groups.setdefault(group_id, Group(group_id=group_id, size=size))

    def size(self, group_id: str) -> int:
        """Episodes that the group is to have."""
        return self._groups[group_id].size

    def published(self, version: int, step: int) -> None:
        """A version is the weights after ``step`` steps; versions of a lineage that was cut keep theirs."""
        self._step_of[version] = self.published_step = step
        self._wake()

    def lag(self, group: Group, step: int) -> int:
        """Steps between the oldest weights that sampled the group and those of ``step``."""
        return lag(step, tuple(self._step_of.get(version, 0) for version in group.versions))

    def expect(self, episode_id: str, group_id: str) -> None:
        """Enter an episode of an admitted group before its request is stored: its result may be read first."""
        self._group_of[episode_id] = group_id

    def requested(self, episode_id: str, sequence: int) -> bool:
        """The episode's request stands at this position of the log; False if it is settled or known already."""
        return self._ledger.requested(episode_id, sequence)

    def finished(self, result: EpisodeFinished) -> None:
        """Enter a result; a group that can't fill a batch any more is discarded with reasons."""
        group = self._groups.get(self._group_of.get(result.episode_id, ""))
        if group is None:
            return
        self._ledger.requested(result.episode_id, result.request_sequence)
        group.add(result)
        if group.complete and len(group.graded) < self._minimum:
            self._discard(group, "group_too_small")
        self._wake()

    def take(self, count: int, step: int) -> list[Group]:
        """``count`` complete groups to train after ``step`` steps, oldest weights first; [] while there are too few.

        Groups beyond the staleness bound are discarded first, or kept if so configured.
        """
        ready = [group for group in self._groups.values() if group.complete]
        if self._drop_late:
            for group in [group for group in ready if self.lag(group, step) > self._max_staleness]:
                self._discard(group, "stale")
                ready.remove(group)
        if len(ready) < count:
            return []
        ready.sort(key=lambda group: (-self.lag(group, step), group.group_id))
        return ready[:count]

    def settle(self, groups: list[Group]) -> tuple[list[str], list[Exclusion]]:
        """The groups are trained: ids that were, and everything excluded since the last call (these groups' own included)."""
        trained = [result.episode_id for group in groups for result in group.graded]
        excluded = self._excluded + [exclusion for group in groups for exclusion in group.excluded]
        self._excluded = []
        for episode_id in trained + [exclusion.episode_id for group in groups for exclusion in group.excluded]:
            self._settle(episode_id)
        for group in groups:
            del self._groups[group.group_id]
        self._wake()
        return trained, excluded

    def discard_all(self, reason: str) -> None:
        """Nothing more will be trained: what is complete is excluded for that reason."""
        for group in [group for group in self._groups.values() if group.complete]:
            self._discard(group, reason)

    def take_exclusions(self) -> list[Exclusion]:
        """Everything excluded that no step has recorded yet."""
        excluded, self._excluded = self._excluded, []
        return excluded

    def _discard(self, group: Group, reason: str) -> None:
        exclusions = group.discard(reason)
        self._excluded += exclusions
        for exclusion in exclusions:
            self._settle(exclusion.episode_id)
        del self._groups[group.group_id]
        self._wake()

    def _settle(self, episode_id: str) -> None:
        self._ledger.settle(episode_id)
        self._group_of.pop(episode_id, None)

    def _wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()
