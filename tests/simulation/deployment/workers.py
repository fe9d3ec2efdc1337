"""The fleet and its supervisor: processes of every role, started, and started again when they end.

Which endings are right is judged here: a worker ends because it was killed, drained, or replaced, and for no other reason.
"""

from __future__ import annotations

import errno
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from fleetbus.config.run_folder import run_folder
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus.delivery.lanes import ANSWER_SECONDS, LEASE_SECONDS, LaneLost, LanesUnread
from fleetbus.errors import BusError, LogLost, RequestUnanswered, UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.stepwise.host import SessionHost
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.checkpoint_choice import START, CheckpointUnread
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.journal import LearnerReplaced
from fleetbus_workers.learner.lineage_start import CheckpointRemoved
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from fleetbus_workers.weights.fetch import WeightsFetcher
from tests.simulation.clients.checked_trainer import CheckedTrainer
from tests.simulation.clients.monitor import watch
from tests.simulation.clients.sessions import GatewayCaller, SessionCaller, run_rollouts
from tests.simulation.clients.stranger import Stranger
from tests.simulation.deployment.configuration import build_tasks, serve_other
from tests.simulation.deployment.fixtures import SimulationFixtures
from tests.simulation.deployment.runtime import build_runtime
from tests.simulation.doubles.engines import SimulatedSampler, UnlearnableSampler
from tests.simulation.doubles.environments import HoldingEnvironment, SimulatedEnvironment
from tests.simulation.observer import ALL_WORKERS
from tests.simulation.platform.bus import SimulatedBus
from tests.simulation.platform.process import Process
from tests.simulation.scenario.shape import OTHER_POLICY, OTHER_SEAT
from tests.support.checked_bus import CheckedBus

RESTART_SECONDS = (0.2, 4.0)
"""Shortest and longest delay before an ended process is restarted."""

UNMADE_SHARE = 0.03

CHECKED = ("environment", "inference", "learner", "recorder", "monitor")
"""Roles that meet the rights of their keys; of clients each says for itself whose it has."""

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


class PerTask(msgspec.Struct, frozen=True):
    """See `fleetbus_workers.environment.base.TaskEnvironmentFactory`."""

    for_task: Callable[[Task], SimulatedEnvironment]


class Deployment:
    """All processes of one world. ``group`` is where they live."""

    def __init__(self, fixtures: SimulationFixtures, group: TaskGroup) -> None:
        self._fixtures = fixtures
        self._group = group
        self._server = fixtures.server
        self._scenario = fixtures.scenario
        self._configuration = fixtures.configuration
        self._observer = fixtures.observer
        self._oracle = fixtures.oracle
        self._log_checker = fixtures.log_checker
        self._tasks = build_tasks(fixtures.scenario)
        self._draw = random.Random(f"fleet/{self._scenario.seed}")
        self._numbers: Counter[str] = Counter()
        self.wanted = Counter(
            environment=self._scenario.environment_workers,
            inference=self._scenario.inference_workers + 2 * self._scenario.other_seat,
            learner=1,
            recorder=int(self._scenario.recorder),
            session_client=self._scenario.session_clients,
            gateway=self._scenario.gateway_clients,
            rollouts=self._scenario.rollout_clients,
            stranger=self._scenario.strangers,
            monitor=self._scenario.monitors,
        )
        self.training_finished = anyio.Event()
        self.is_closing = False
        self._orders = 0
        self._bucket: dict[str, bytes] | None = {} if self._scenario.weights_in_bucket else None

    def start(self, role: str) -> Process:
        """One more process of that role."""
        name = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        slots = {"environment": self._scenario.environment_slots, "inference": self._scenario.inference_slots}.get(role, 1)
        process = Process(role, name, slots, self._observer, session_slots=self._configuration.environment.session_slots)
        self._oracle.processes[name] = process
        self._group.start_soon(self._supervise, process)
        return process

    def start_all(self) -> None:
        for role, count in self.wanted.items():
            for _ in range(count):
                self.start(role)

    def visit(self, role: str) -> None:
        """A client of that role comes, and goes when it has done its work."""
        self.wanted[role] += 1
        self.start(role)

    async def leave(self, role: str, seconds: float) -> None:
        """All of a role are drained, and are not there for so long."""
        wanted, self.wanted[role] = self.wanted[role], 0
        for process in self.alive(role):
            self._observer.disturb("leave", process.name, seconds=seconds)
            process.stop()
        await anyio.sleep(seconds)
        self.wanted[role] = wanted
        for _ in range(wanted - len(self.alive(role))):
            self.start(role)

    def alive(self, role: str) -> list[Process]:
        return [process for process in self._oracle.processes.values() if process.role == role and process.is_alive]

    async def _supervise(self, process: Process) -> None:
        faults, bucket = self._fixtures.network_faults, self._bucket
        await process.live(self._server, faults, self._oracle, lambda wire: self._work(process, wire), bucket)
        self._check_ending(process)
        if process.role == "learner" and self._log_checker.training.finished:
            self.training_finished.set()
            return
        if process.role in CLIENTS and process.ending == "finished":
            self.wanted[process.role] -= 1
            return
        await anyio.sleep(self._draw.uniform(*RESTART_SECONDS))
        if not self.is_closing and len(self.alive(process.role)) < self.wanted[process.role]:
            self.start(process.role)

    # Endings

    def _check_ending(self, process: Process) -> None:
        if process.ending == "failed":
            leaves = list(_iterate_leaves(process.error))
            wrong = [leaf for leaf in leaves if not self._may_end(process, leaf)]
            for leaf in wrong:
                where = "".join(traceback.format_exception(leaf)[-3:])
                self._observer.violate("no fault ends a worker", f"{process.name}: {type(leaf).__name__}: {leaf}\n{where}")
        elif process.ending == "finished" and process.role not in CLIENTS and not process.drain.is_set():
            is_done = process.role == "learner" and self._log_checker.training.finished
            self._observer.require(is_done, "a worker works until it is told to stop", process.name)

    def _may_end(self, process: Process, error: BaseException) -> bool:
        if isinstance(error, LearnerReplaced):
            newest = self._log_checker.training.lineage
            return newest is not None and newest.worker != process.name
        if isinstance(error, LogLost):
            return self._has_lost_power
        if isinstance(error, UserError) and self._has_lost_power and self._follow_advice(str(error)):
            return True
        if isinstance(error, CheckpointUnread):
            return self._order_restart()
        if isinstance(error, CheckpointRemoved):
            return any(each is not process for each in self.alive("learner"))
        if isinstance(error, UserError) and str(error).startswith("learner.restart_from = ") and self._scenario.rare:
            return self._order_restart()
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

    def _follow_advice(self, error: str) -> bool:
        """An operator reads that the log lost what an archive or checkpoints hold, and does what is said there."""
        if "give another --archive" in error:
            folder = self._fixtures.folder / f"archive-{len(self._fixtures.archives) + 1}"
            self._fixtures.archives.append(folder)
            learner = msgspec.structs.replace(self._configuration.learner, archive=str(folder))
            self._configuration = msgspec.structs.replace(self._configuration, learner=learner)
            return True
        return "the log names no checkpoint" in error and self._order_restart()

    def _order_restart(self) -> bool:
        """An operator reads that no checkpoint can be read, and says where to resume; False if none was spoiled.

        That is where the newest checkpoint lies that counts and is whole, or else the beginning.
        """
        spoiled = [each for each in self._observer.disturbances if each.kind in CHECKPOINT_FAULTS]
        self._orders += 1
        step = self._log_checker.training.find_readable_step(run_folder(self._configuration.run).checkpoints)
        order = f"{START if step is None else step}/{self._orders}"
        if self._scenario.rare and self._orders <= len(MISTYPED):
            order = MISTYPED[self._orders - 1]
        learner = msgspec.structs.replace(self._configuration.learner, restart_from=order)
        self._configuration = msgspec.structs.replace(self._configuration, learner=learner)
        return bool(spoiled)

    # Work

    async def _work(self, process: Process, wire: SimulatedBus) -> None:
        work = {
            "environment": self._run_environment,
            "inference": self._run_inference,
            "learner": self._run_learner,
            "recorder": self._run_recorder,
            "session_client": self._run_client,
            "gateway": self._run_client,
            "rollouts": self._run_client,
            "stranger": self._run_client,
            "monitor": self._run_monitor,
        }
        await work[process.role](process, _check(wire, process.role) if process.role in CHECKED else wire)

    async def _run_environment(self, process: Process, wire: SimulatedBus) -> None:
        await self._host_environments(process, wire, process.drain)

    async def _run_gateway(self, process: Process, wire: SimulatedBus, draw: random.Random) -> None:
        """In some seeds with environments in its own process, as `fleetbus gateway` on one machine has them."""
        caller = GatewayCaller(process, self._log_checker.sessions, self._observer, draw)
        if not self._scenario.gateways_host:
            await caller.run(_check(wire, "gateway"))
            return
        caller.floods = self._scenario.rare
        process.slots, drain, hosting = self._scenario.environment_slots, anyio.Event(), anyio.Event()

        def use(host: SessionHost) -> None:
            caller.local_host = host
            hosting.set()

        async with anyio.create_task_group() as group:
            group.start_soon(self._host_environments, process, _check(wire, "environment"), drain, use)
            await hosting.wait()
            await caller.run(_check(wire, "gateway"))
            process.stop()
            drain.set()

    async def _host_environments(
        self,
        process: Process,
        wire: SimulatedBus,
        drain: anyio.Event,
        on_hosting: Callable[[SessionHost], None] = lambda _: None,
    ) -> None:
        draw = random.Random(f"environments/{self._scenario.seed}/{process.name}")

        def make(task: Task) -> SimulatedEnvironment:
            is_session = "episode" not in structlog.contextvars.get_contextvars()
            if self._scenario.rare and not is_session and draw.random() < UNMADE_SHARE:
                self._observer.disturb_message("unmade", f"fb.sim.task.{structlog.contextvars.get_contextvars()['episode']}")
                raise EnvironmentFailed("it cannot be made")
            kind = HoldingEnvironment if self._scenario.rare and is_session else SimulatedEnvironment
            return kind(
                process,
                self._scenario.session_faults if is_session else self._scenario.fault_profile,
                replayable=self._scenario.replayable,
                work=1.0 if is_session else self._scenario.pace.work,
                segments=self._scenario.segments,
                seats=0 if is_session else self._scenario.seats,
                other_seat=OTHER_SEAT if self._scenario.other_seat else "",
                seed=self._scenario.seed,
                draw=draw,
                observer=self._observer,
                register=self._log_checker.sessions.register_environment if is_session else self._oracle.register_environment,
                session=task.key if is_session else "",
            )

        await run_environment(
            wire,
            configuration=self._configuration,
            name=process.name,
            drain=drain,
            make=PerTask(make),
            runtime=build_runtime(self._fixtures, process),
            on_hosting=on_hosting,
        )

    async def _run_inference(self, process: Process, wire: SimulatedBus) -> None:
        draw = random.Random(f"engine/{self._scenario.seed}/{process.name}")
        configuration, fault_profile, kind = self._configuration, self._scenario.fault_profile, SimulatedSampler
        if self._scenario.other_seat:  # the policies have as many workers each, as far as that goes
            served = [each.policy for each in self.alive("inference")]
            process.policy = min((configuration.run.policy, OTHER_POLICY), key=served.count)
            if process.policy == OTHER_POLICY:
                configuration, kind = serve_other(configuration), UnlearnableSampler
        await run_inference(
            wire,
            configuration=configuration,
            name=process.name,
            drain=process.drain,
            sampler=kind(process, fault_profile, seed=self._scenario.seed, draw=draw, observer=self._observer),
            template=ScriptedTemplate(),
            fetch=WeightsFetcher(self._fixtures.folder / "fetched" / process.name, wire.objects("")).fetch_local,
            runtime=build_runtime(self._fixtures, process),
        )

    async def _run_learner(self, process: Process, wire: SimulatedBus) -> None:
        trainer = CheckedTrainer(self._observer, self._log_checker.episodes.record, self._configuration)
        await run_learner(
            wire,
            configuration=self._configuration,
            name=process.name,
            drain=process.drain,
            trainer=trainer,
            curriculum=Curriculum(self._tasks, self._tasks, seed=self._scenario.seed),
            runtime=build_runtime(self._fixtures, process, seconds=self._scenario.blocking_seconds),
        )
        training = self._log_checker.training
        if training.finished and training.lineage is not None and training.lineage.worker == process.name:
            same = trainer.trained == training.trained
            self._observer.require(same, "the weights hold what the surviving lineage trained", process.name)

    async def _run_recorder(self, process: Process, wire: SimulatedBus) -> None:
        await run_recorder(
            wire,
            configuration=self._configuration,
            name=process.name,
            drain=process.drain,
            folder=self._fixtures.archive,
            settings=RecorderSettings(
                trim_seconds=self._scenario.pace.trim_seconds, settle_seconds=self._scenario.settle_seconds
            ),
            runtime=build_runtime(self._fixtures, process, seconds=self._scenario.archive_seconds),
        )

    async def _run_client(self, process: Process, wire: SimulatedBus) -> None:
        draw = random.Random(f"client/{self._scenario.seed}/{process.name}")
        match process.role:
            case "session_client":
                await SessionCaller(process, self._log_checker.sessions, self._observer, draw).run(_check(wire, "gateway"))
            case "gateway":
                await self._run_gateway(process, wire, draw)
            case "stranger":
                sessions = self._log_checker.sessions
                stranger = Stranger(process, sessions, self._observer, draw, self._list_environments)
                stranger.floods = self._scenario.rare
                await stranger.run(wire)
            case _:
                await run_rollouts(
                    process, _check(wire, "operator"), self._configuration, self._tasks, self._log_checker.episodes,
                    self._observer, build_runtime(self._fixtures, process),
                )  # fmt: skip

    async def _run_monitor(self, process: Process, wire: SimulatedBus) -> None:
        await watch(wire, process)

    def _list_environments(self) -> list[str]:
        return [process.name for process in self.alive("environment")]


def _iterate_leaves(error: BaseException | None) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _iterate_leaves(inner)
    elif error is not None:
        yield error


def _check(wire: SimulatedBus, role: str) -> SimulatedBus:
    return cast(SimulatedBus, CheckedBus(wire, role))
