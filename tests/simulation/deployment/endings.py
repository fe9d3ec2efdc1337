"""Judges how the processes of a simulation end, and does what an operator would do then.

A worker ends because it was killed, drained, or replaced, and for no other reason.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator

import anyio
import msgspec

from fleetbus.config.run_folder import policy_folder
from fleetbus.config.settings import Configuration
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus.delivery.lanes import ANSWER_SECONDS, LEASE_SECONDS, LaneLost, LanesUnread
from fleetbus.errors import BusError, LogLost, RequestUnanswered, UserError
from fleetbus_workers.learner.checkpoint_choice import START, CheckpointUnread
from fleetbus_workers.learner.journal import LearnerReplaced
from fleetbus_workers.learner.lineage_start import CheckpointRemoved
from tests.simulation.deployment.fixtures import SimulationFixtures
from tests.simulation.judge.training_checker import TrainingChecker
from tests.simulation.observer import ALL_WORKERS
from tests.simulation.platform.process import Process

MISTYPED = ("l1", "999")
"""What an operator gives who does not read: no step, and one without a checkpoint."""

LONGEST_EFFECT_SECONDS = 60.0
"""How long after a fault a worker may still end of it."""

RENEWALS_PER_LEASE = 2
"""So many that are lost, or come late, cost a lane: each is waited for, and a lost answer costs the one after it."""

LANE_SECONDS = LEASE_SECONDS + 2 * (HEARTBEAT_SECONDS + ANSWER_SECONDS)
"""From the first renewal that is lost until a worker hears that its lane is another's."""

_LANE = re.compile(r"^lane (\S+)")

CHECKPOINT_FAULTS = frozenset({"spoil_checkpoint", "lose_checkpoints", "rewind_checkpoints", "lose_power"})

CLIENTS = frozenset({"session_client", "gateway", "rollouts", "stranger"})
"""Roles that end when they have done what they came for."""


class EndingJudge:
    """``configurations``: by policy what its next learner is given, which an operator changes; ``alive`` lists the processes of
    a role."""

    def __init__(
        self, fixtures: SimulationFixtures, configurations: dict[str, Configuration], alive: Callable[[str], list[Process]]
    ) -> None:
        self._fixtures = fixtures
        self._configurations = configurations
        self._alive = alive
        self._scenario = fixtures.scenario
        self._observer = fixtures.observer
        self._oracle = fixtures.oracle
        self._orders = 0

    def check(self, process: Process) -> None:
        """Report a process that has ended without a cause."""
        if process.ending == "failed":
            leaves = list(_iterate_leaves(process.error))
            wrong = [leaf for leaf in leaves if not self._may_end(process, leaf)]
            for leaf in wrong:
                where = "".join(traceback.format_exception(leaf)[-3:])
                self._observer.violate("no fault ends a worker", f"{process.name}: {type(leaf).__name__}: {leaf}\n{where}")
        elif process.ending == "finished" and process.role not in CLIENTS and not process.drain.is_set():
            is_done = process.role == "learner" and self._training(process).finished
            self._observer.require(is_done, "a worker works until it is told to stop", process.name)

    def _may_end(self, process: Process, error: BaseException) -> bool:
        if isinstance(error, LearnerReplaced):
            newest = self._training(process).lineage
            return newest is not None and newest.worker != process.name
        if isinstance(error, LogLost):
            return self._has_lost_power
        if isinstance(error, UserError) and self._has_lost_power and self._follow_advice(process, str(error)):
            return True
        if isinstance(error, CheckpointUnread):
            return self._order_restart(process)
        if isinstance(error, CheckpointRemoved):
            return any(each is not process for each in self._alive("learner") if each.policy == process.policy)
        if isinstance(error, UserError) and str(error).startswith("learner.restart_from = ") and self._scenario.rare:
            return self._order_restart(process)
        since = anyio.current_time() - LONGEST_EFFECT_SECONDS
        if isinstance(error, (LaneLost, BusError)) and self._observer.was_disturbed(process.name, since=since):
            return True
        if isinstance(error, LaneLost):
            from_first = anyio.current_time() - LANE_SECONDS
            lost = [self._observer.message_faults(lane, since=from_first) for lane in _LANE.findall(str(error))]
            return sum(lost) >= RENEWALS_PER_LEASE
        if isinstance(error, (LanesUnread, RequestUnanswered)):  # only who has yet to begin ends of a read
            has_begun = process.name in self._oracle.heard
            unread = self._observer.message_fault_count(since, kind="read_lost") > 0
            return not has_begun and (unread or self._observer.was_disturbed(process.name, since=since))
        if isinstance(error, OSError) and error.errno == errno.EIO:
            return any(each.kind == "disk_failed" and each.worker == process.name for each in self._observer.disturbances)
        if isinstance(error, UserError) and "already has a recorder" in str(error):
            return self._observer.was_disturbed(ALL_WORKERS, since=anyio.current_time() - 60)
        return isinstance(error, UserError) and "server is down" in str(error)

    @property
    def _has_lost_power(self) -> bool:
        return any(each.kind == "lose_power" for each in self._observer.disturbances)

    def _follow_advice(self, process: Process, error: str) -> bool:
        """An operator reads that the log lost what an archive or checkpoints hold, and does what is said there."""
        if "give another --archive" in error:
            folder = self._fixtures.folder / f"archive-{len(self._fixtures.archives) + 1}"
            self._fixtures.archives.append(folder)
            for policy in self._configurations:
                self._change(policy, archive=str(folder))
            return True
        return "the log names no checkpoint" in error and self._order_restart(process)

    def _order_restart(self, process: Process) -> bool:
        """An operator reads that no checkpoint can be read, and says where to resume; False if none was spoiled.

        That is where the newest checkpoint lies that counts and is whole, or else the beginning.
        """
        spoiled = [each for each in self._observer.disturbances if each.kind in CHECKPOINT_FAULTS]
        self._orders += 1
        folder = policy_folder(self._configurations[process.policy].run).checkpoints
        step = self._training(process).find_readable_step(folder)
        order = f"{START if step is None else step}/{self._orders}"
        if self._scenario.rare and self._orders <= len(MISTYPED):
            order = MISTYPED[self._orders - 1]
        self._change(process.policy, restart_from=order)
        return bool(spoiled)

    def _change(self, policy: str, **settings: str) -> None:
        given = self._configurations[policy]
        learner = msgspec.structs.replace(given.learner, **settings)
        self._configurations[policy] = msgspec.structs.replace(given, learner=learner)

    def _training(self, process: Process) -> TrainingChecker:
        return self._fixtures.log_checker.trainings[process.policy]


def _iterate_leaves(error: BaseException | None) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _iterate_leaves(inner)
    elif error is not None:
        yield error
