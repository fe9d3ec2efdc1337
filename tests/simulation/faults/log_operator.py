"""An operator who gives a log more room once it is too small for a step: where most groups are discarded, a step takes more.

What is discarded is settled by the next step alone, so a learner that finds no room for the groups that its batch still lacks
says so (`fleetbus.delivery.requests`) and waits. A log that is full of what was settled before is a fault, and gets no room.
"""

from __future__ import annotations

import anyio
import msgspec

from fleetbus.core.training.groups import Group
from fleetbus.core.training.own_seats import select_own_seats
from fleetbus.delivery.requests import STUCK_SECONDS
from tests.simulation.deployment.fixtures import SimulationFixtures
from tests.simulation.judge.training_checker import TrainingChecker
from tests.simulation.scenario.shape import POLICY

LOOK_SECONDS = 10.0

MORE_ROOM = 1.5
"""How many times as large a log becomes."""

FULL_SHARE = 0.99

SETTLED_SHARE = 0.1
"""What is settled may take so much of the log: some of it left open ones behind."""


class LogOperator:
    """`run` looks now and then."""

    def __init__(self, fixtures: SimulationFixtures) -> None:
        self._fixtures = fixtures

    async def run(self) -> None:
        """Until cancelled."""
        log, checker = self._fixtures.log, self._fixtures.log_checker
        while True:
            await anyio.sleep(LOOK_SECONDS)
            waited = anyio.current_time() - checker.stored_at
            if waited > STUCK_SECONDS and self._is_too_small() and not self._holds_settled():
                limit = round(log.plan.max_bytes * MORE_ROOM)
                self._fixtures.observer.trace("operator gives the log room", limit)
                log.plan = msgspec.structs.replace(log.plan, max_bytes=limit)

    def _is_too_small(self) -> bool:
        """True if nothing is played, and the batch of some learner cannot be made of what was; or nothing fits."""
        log, checker, scenario = self._fixtures.log, self._fixtures.log_checker, self._fixtures.scenario
        if checker.episodes.open:
            return False
        if log.size_bytes > log.plan.max_bytes * FULL_SHARE:
            return True
        learning = [(policy, training) for policy, training in checker.trainings.items() if not training.finished]
        return any(self._count_usable(policy, training) < scenario.groups for policy, training in learning)

    def _count_usable(self, policy: str, training: TrainingChecker) -> int:
        groups: dict[str, Group] = {}
        for record in training.list_unsettled():
            request = record.request
            group = groups.setdefault(request.group_id, Group(group_id=request.group_id, size=request.group_size))
            if record.result is not None:
                group.add(select_own_seats(record.result, "" if policy == POLICY else policy))
        least = self._fixtures.scenario.min_group_size
        return sum(len(group.graded) >= least for group in groups.values() if group.complete)

    def _holds_settled(self) -> bool:
        log, checker = self._fixtures.log, self._fixtures.log_checker
        needed = {each.request.episode_id for training in checker.trainings.values() for each in training.list_unsettled()}
        settled = checker.episodes.record.keys() - needed
        held = sum(
            len(entry.payload)
            for entry in checker.entries
            if entry.subject.rpartition(".")[2] in settled and log.get(entry.sequence) is not None
        )
        return held > log.plan.max_bytes * SETTLED_SHARE
