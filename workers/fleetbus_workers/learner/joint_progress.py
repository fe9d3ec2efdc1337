"""The learners of other policies that train from the episodes which this one asks for: how far they are behind.

A learner that is behind, or away, would find its groups stale: so no more are out for any of them than for this one.
"""

from collections.abc import Callable, Sequence

import anyio
import structlog

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.delivery.heartbeats import LOST_AFTER_SECONDS, follow_heartbeats
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import RETRY_SECONDS, read_entry
from fleetbus_schemas import Heartbeat, LineageStarted, Subjects, TrainingFinished
from fleetbus_schemas.channels import STORED

log = structlog.get_logger()

MAX_GROUPS = 2**53
"""More than any run has; the next number cannot be told from it."""


class JointProgress:
    """The groups that the learners of ``policies`` have not settled, by what they say of themselves."""

    def __init__(self, policies: Sequence[str] = ()) -> None:
        self._open = dict.fromkeys(policies, 0)
        self._seen = dict.fromkeys(policies, 0)
        self._finished: set[str] = set()
        self._heard_at: dict[str, float] = {}

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

    async def follow(self, bus: Bus, subjects: Subjects, notify: Callable[[], None]) -> None:
        """Keep up with them, until cancelled; ``notify`` is called after each change. One that finished may have done so long
        ago: the end of its journal says it."""
        if not self._seen:
            return
        self._heard_at = dict.fromkeys(self._seen, anyio.current_time())

        def record(beat: Heartbeat) -> None:
            self.record(beat)
            self._heard_at[beat.policy] = anyio.current_time()
            notify()

        async with anyio.create_task_group() as group:
            group.start_soon(follow_heartbeats, bus, subjects.heartbeat("learner", "*"), record)
            group.start_soon(self._tell_of_silence)
            for policy in self._seen:
                group.start_soon(self._follow_journal, bus, policy, subjects.train(policy), notify)

    async def _follow_journal(self, bus: Bus, policy: str, subject: str, notify: Callable[[], None]) -> None:
        last = await _read_last(bus, subject)
        async with bus.read([subject], start=last.sequence if last is not None else 1) as reader:
            while True:
                entry = read_entry(STORED["train"], await reader.receive())
                if isinstance(entry, LineageStarted):
                    self._finished.discard(policy)
                elif isinstance(entry, TrainingFinished) and not entry.more:
                    self._finished.add(policy)
                notify()

    async def _tell_of_silence(self) -> None:
        """For ever: say once of each learner that is not heard of that it is waited for."""
        told: set[str] = set()
        while True:
            await anyio.sleep(LOST_AFTER_SECONDS)
            silent = {
                policy
                for policy in self._seen.keys() - self._finished
                if anyio.current_time() - self._heard_at[policy] > LOST_AFTER_SECONDS
            }
            for policy in sorted(silent - told):
                log.warning("the learner of another policy is not heard of; it will be waited for", policy=policy)
            told = silent


async def _read_last(bus: Bus, subject: str) -> StreamEntry | None:
    while True:
        try:
            return await bus.last(subject)
        except RequestUnanswered as unanswered:
            log.warning("last entry read failed; retrying", subject=subject, reason=str(unanswered))
            await anyio.sleep(RETRY_SECONDS)
