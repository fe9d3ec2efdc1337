"""The training requests of another policy's learner: this one trains the seats of its own policy in the same episodes.

It takes the place of `fleetbus_workers.learner.admission.Admission`, and asks for nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import anyio.lowlevel
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.config.settings import LimitSettings
from fleetbus.core.training.floor import find_group_number, parse_group_number
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import read_entry, read_episode_state
from fleetbus_schemas import EpisodeRequested, FloorRaised, LineageStarted, Subjects, TrainingFinished
from fleetbus_schemas.channels import STORED
from fleetbus_workers.learner.pool import GroupPool

log = structlog.get_logger()

CHECK_SECONDS = 5.0
"""How often it is looked whether a result is overdue."""

GROUPS_AT_ONCE = 256
"""So many groups are looked through before others have their turn on the event loop."""


class JoinedRequests:
    """The requests of the learner of ``requested_by`` in which ``policy`` has a seat that is trained. They are entered as they
    stand in the log, before their results; one that is stored again after the log lost it may stand behind its result, which
    `follow` finds. ``steps`` are those that both are to train."""

    def __init__(
        self,
        pool: GroupPool,
        *,
        policy: str,
        requested_by: str,
        next_group: int,
        steps: int,
        limits: LimitSettings | None = None,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._requested_by = requested_by
        self._steps = steps
        self._limits = limits or LimitSettings()
        self._look_at: dict[str, float] = {}
        """By episode without a result when the log is asked for it, by this process's clock: the server's may be set."""
        self._first_group = 0
        self.metrics: dict[str, float] = {}
        self.is_paused = False
        self.pause: Callable[[bool], None] | None = None
        """Nothing is asked for here: the learner that asks is told, and answers."""
        self._settled: defaultdict[str, list[str]] = defaultdict(list)
        """By group the episodes that a checkpoint settled."""
        self.next_group = next_group
        self.is_over = False
        """True once the learner that asks has trained its last step."""

    @property
    def first_open_group(self) -> int:
        """The first group that is not settled."""
        return min((parse_group_number(group_id) for group_id in self._pool.group_ids), default=self.next_group)

    def list_subjects(self, subjects: Subjects) -> list[str]:
        """The subjects to `enter` the entries of, together with the results."""
        return [subjects.tasks(), subjects.train(self._requested_by), subjects.floor]

    async def take_over(self, requests: Iterable[tuple[int, EpisodeRequested]], first_group: int = 0) -> None:
        """Groups below ``first_group`` are settled for good; ``requests`` will be read again, in their order."""
        self._first_group = first_group
        self.next_group = max(self.next_group, first_group)

    async def run(self, drain: anyio.Event) -> None:
        """Nothing, until drained."""
        await drain.wait()

    async def follow(self, bus: LogBus, subjects: Subjects) -> None:
        """Until cancelled, look in the log for each result that has not been read when deadline and grace have passed, by when
        the learner that asks has stored one itself (docs/concepts/delivery.md, rule 9).

        A worker that lives on when the log loses a request stores its result all the same, and who asks stores the request
        again, behind it. Nothing comes after that, and the group would be waited for without end.
        """
        while True:
            await anyio.sleep(CHECK_SECONDS)
            for episode_id in await self._list_overdue(bus.now_ns()):
                try:
                    result = (await read_episode_state(bus, subjects, episode_id)).result_of_claim
                except RequestUnanswered as unanswered:
                    log.warning("result read failed; retrying later", episode=episode_id, reason=str(unanswered))
                    continue
                if result is not None:
                    self._pool.add_result(result, result.request_sequence)

    async def _list_overdue(self, now_ns: int) -> list[str]:
        """Episodes whose results are to be looked for; those of them that have none come again after another grace."""
        now, limits, group_ids = anyio.current_time(), self._limits, self._pool.group_ids
        look_at: dict[str, float] = {}
        overdue = []
        for start in range(0, len(group_ids), GROUPS_AT_ONCE):
            for group_id in group_ids[start : start + GROUPS_AT_ONCE]:
                for episode_id, deadline_ns in self._pool.list_unanswered(group_id).items():
                    if (at := self._look_at.get(episode_id)) is None:
                        at = now + min((deadline_ns - now_ns) / 1e9, limits.episode) + limits.grace
                    if at <= now:
                        overdue.append(episode_id)
                        at = now + limits.grace
                    look_at[episode_id] = at
            await anyio.lowlevel.checkpoint()
        self._look_at = look_at
        return overdue

    def enter(self, stored: StreamEntry) -> None:
        """An entry of `list_subjects`, in the order of the log."""
        kind = stored.subject.split(".", 3)[2]
        if kind == "floor":
            floor = read_entry(STORED["floor"], stored)
            if isinstance(floor, FloorRaised):  # a copy of a request that left the log is stored behind it
                self._first_group = max(self._first_group, floor.groups.get(self._policy, 0))
        elif kind == "train":
            entry = read_entry(STORED["train"], stored)
            if isinstance(entry, LineageStarted):
                self.is_over = False
            elif isinstance(entry, TrainingFinished) and not entry.more and entry.step >= self._steps:
                self.is_over = True
                self._pool.notify()
        elif (request := read_entry(STORED["task"], stored)) is not None:
            assert isinstance(request, EpisodeRequested)
            self._enter_request(request, stored.sequence)

    def _enter_request(self, request: EpisodeRequested, sequence: int) -> None:
        number, group_id = find_group_number(request), request.group_id
        if number is None or request.policy != self._requested_by or number < self._first_group:
            return
        if not any(seat.trained and seat.policy == self._policy for seat in request.seats):
            return
        if self._pool.expects(request.episode_id):
            return
        self.next_group = max(self.next_group, number + 1)
        if not self._pool.register_request(request.episode_id, sequence):
            self._settled[group_id].append(request.episode_id)
            if group_id in self._pool.group_ids:
                self._cut(group_id)
            return
        self._pool.admit(group_id, request.group_size)
        self._pool.expect(request.episode_id, group_id, request.deadline_ns)
        self._cut(group_id)

    def _cut(self, group_id: str) -> None:
        """Tell of the episodes of a group that were settled without the others."""
        for episode_id in self._settled.pop(group_id, ()):
            self._pool.record_settlement(episode_id, group_id)
