"""The learners of other policies that train from the episodes which this one asks for: how far they are behind.

A learner that is behind, or away, would find its groups stale: so no more are out for any of them than for this one.
"""

from collections.abc import Callable, Sequence

import anyio

from fleetbus.bus.base import Bus
from fleetbus.delivery.heartbeats import follow_heartbeats
from fleetbus.log.episodes import read_entry
from fleetbus_schemas import Heartbeat, LineageStarted, Subjects, TrainingFinished
from fleetbus_schemas.channels import STORED

MAX_GROUPS = 2**53
"""More than any run has; the next number cannot be told from it."""


class JointProgress:
    """The groups that the learners of ``policies`` have not settled, by what they say of themselves."""

    def __init__(self, policies: Sequence[str] = ()) -> None:
        self._open = dict.fromkeys(policies, 0)
        self._seen = dict.fromkeys(policies, 0)
        self._finished: set[str] = set()

    def begin(self, next_group: int) -> None:
        """Groups below ``next_group`` were asked for by earlier learners: until one says what it holds, it holds none."""
        self._seen = {policy: max(seen, next_group) for policy, seen in self._seen.items()}

    def record(self, beat: Heartbeat) -> None:
        """Take what a learner says of the groups that it holds, and of the first that it has not read of; numbers that are none
        are ignored."""
        seen = beat.counters.get("groups_seen", 0.0)
        if beat.policy in self._seen and beat.in_flight >= 0 and 0 <= seen < MAX_GROUPS:
            self._open[beat.policy] = beat.in_flight
            self._seen[beat.policy] = int(seen)

    def count_outstanding(self, next_group: int) -> int:
        """The most groups below ``next_group`` that a learner still has to settle; 0 once all have finished."""
        waiting = [policy for policy in self._seen if policy not in self._finished]
        return max((self._open[each] + max(next_group - self._seen[each], 0) for each in waiting), default=0)

    async def follow(self, bus: Bus, subjects: Subjects, start: int, notify: Callable[[], None]) -> None:
        """Keep up with them, until cancelled; ``notify`` is called after each change."""
        if not self._seen:
            return

        def record(beat: Heartbeat) -> None:
            self.record(beat)
            notify()

        async with anyio.create_task_group() as group:
            group.start_soon(follow_heartbeats, bus, subjects.heartbeat("learner", "*"), record)
            async with bus.read([subjects.train(policy) for policy in self._seen], start=start) as reader:
                while True:
                    stored = await reader.receive()
                    entry, policy = read_entry(STORED["train"], stored), stored.subject.rpartition(".")[2]
                    if isinstance(entry, LineageStarted):
                        self._finished.discard(policy)
                    elif isinstance(entry, TrainingFinished) and not entry.more:
                        self._finished.add(policy)
                    notify()
