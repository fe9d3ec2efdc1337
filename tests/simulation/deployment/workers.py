"""The fleet and its supervisor: processes of every role, started, and started again when they end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import cast

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from fleetbus_schemas import Task
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.stepwise.host import SessionHost
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from fleetbus_workers.weights.fetch import WeightsFetcher
from tests.simulation.clients.checked_trainer import CheckedTrainer
from tests.simulation.clients.monitor import watch
from tests.simulation.clients.sessions import GatewayCaller, SessionCaller, run_rollouts
from tests.simulation.clients.stranger import Stranger
from tests.simulation.deployment.configuration import build_tasks, configure_learners, serve_other
from tests.simulation.deployment.endings import CLIENTS, EndingJudge
from tests.simulation.deployment.fixtures import SimulationFixtures
from tests.simulation.deployment.runtime import build_runtime
from tests.simulation.doubles.engines import SimulatedSampler, UnlearnableSampler
from tests.simulation.doubles.environments import HoldingEnvironment, SimulatedEnvironment
from tests.simulation.platform.bus import SimulatedBus
from tests.simulation.platform.process import Process
from tests.simulation.scenario.shape import OTHER_SEAT, POLICY
from tests.support.checked_bus import CheckedBus

RESTART_SECONDS = (0.2, 4.0)
"""Shortest and longest delay before an ended process is restarted."""

UNMADE_SHARE = 0.03

JOINED_PACE = 2.0
"""So many times as long trains a learner that asks for nothing: the one that asks has to wait for it."""

CHECKED = ("environment", "inference", "learner", "recorder", "monitor")
"""Roles that meet the rights of their keys; of clients each says for itself whose it has."""


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
            learner=len(self._scenario.trained_policies),
            recorder=int(self._scenario.recorder),
            session_client=self._scenario.session_clients,
            gateway=self._scenario.gateway_clients,
            rollouts=self._scenario.rollout_clients,
            stranger=self._scenario.strangers,
            monitor=self._scenario.monitors,
        )
        self.training_finished = anyio.Event()
        self.is_closing = False
        self.configurations = configure_learners(self._scenario, self._configuration)
        """By policy that of its next learner."""
        self._judge = EndingJudge(fixtures, self.configurations, self.alive)
        self._bucket: dict[str, bytes] | None = {} if self._scenario.weights_in_bucket else None

    def start(self, role: str, policy: str = "") -> Process:
        """One more process of that role; a learner of ``policy``, or of the one that has the fewest."""
        name = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        slots = {"environment": self._scenario.environment_slots, "inference": self._scenario.inference_slots}.get(role, 1)
        process = Process(role, name, slots, self._observer, session_slots=self._configuration.environment.session_slots)
        if role == "learner":
            learners = [each.policy for each in self.alive(role)]
            process.policy = policy or min(self.configurations, key=learners.count)
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

    def learners(self, policy: str) -> list[Process]:
        return [process for process in self.alive("learner") if process.policy == policy]

    async def _supervise(self, process: Process) -> None:
        faults, bucket = self._fixtures.network_faults, self._bucket
        await process.live(self._server, faults, self._oracle, lambda wire: self._work(process, wire), bucket)
        self._judge.check(process)
        if process.role == "learner" and self._log_checker.trainings[process.policy].finished:
            if self._log_checker.has_finished:
                self.training_finished.set()
            return
        if process.role in CLIENTS and process.ending == "finished":
            self.wanted[process.role] -= 1
            return
        await anyio.sleep(self._draw.uniform(*RESTART_SECONDS))
        if not self.is_closing and self._is_short_of(process):
            self.start(process.role, process.policy if process.role == "learner" else "")

    def _is_short_of(self, process: Process) -> bool:
        """True if one like it has to take its place; of each policy one learner is there, unless all are away."""
        if process.role == "learner":
            is_wanted = bool(self.wanted["learner"]) and not self._log_checker.trainings[process.policy].finished
            return is_wanted and not self.learners(process.policy)
        return len(self.alive(process.role)) < self.wanted[process.role]

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
                ahead=0.0 if is_session else self._scenario.ahead,
                seats=0 if is_session else self._scenario.seats,
                other_seat=OTHER_SEAT if self._scenario.other_seat else "",
                is_other_trained=self._scenario.trained_seat,
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
            process.policy = min((configuration.run.policy, self._scenario.other_policy), key=served.count)
            if process.policy != configuration.run.policy:
                configuration = serve_other(configuration)
                kind = UnlearnableSampler if configuration.inference.frozen else kind
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
        configuration = self.configurations[process.policy]
        trainer = CheckedTrainer(self._observer, self._log_checker.episodes.record, configuration)
        pace = JOINED_PACE if configuration.learner.requested_by else 1.0
        await run_learner(
            wire,
            configuration=configuration,
            name=process.name,
            drain=process.drain,
            trainer=trainer,
            curriculum=Curriculum(self._tasks, self._tasks, seed=self._scenario.seed),
            runtime=build_runtime(self._fixtures, process, seconds=self._scenario.blocking_seconds * pace),
        )
        training = self._log_checker.trainings[process.policy]
        if training.finished and training.lineage is not None and training.lineage.worker == process.name:
            same = trainer.trained == training.trained
            self._observer.require(same, "the weights hold what the surviving lineage trained", process.name)

    async def _run_recorder(self, process: Process, wire: SimulatedBus) -> None:
        await run_recorder(
            wire,
            configuration=self.configurations[POLICY],
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
                    process, _check(wire, "operator"), self.configurations[POLICY], self._tasks, self._log_checker.episodes,
                    self._observer, build_runtime(self._fixtures, process),
                )  # fmt: skip

    async def _run_monitor(self, process: Process, wire: SimulatedBus) -> None:
        await watch(wire, process)

    def _list_environments(self) -> list[str]:
        return [process.name for process in self.alive("environment")]


def _check(wire: SimulatedBus, role: str) -> SimulatedBus:
    return cast(SimulatedBus, CheckedBus(wire, role))
