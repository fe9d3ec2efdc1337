"""Every role, past every one of its periodic jobs, with the key of its role alone: a right that is missing ends the worker.

Clocks are moved, not waited for: sweeps, renewals, expiry and retention come every fifth of a second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.nats import bus as nats_bus
from fleetbus.bus.streams import plan_run
from fleetbus.client.sessions import sessions
from fleetbus.config.settings import (
    ArchiveSettings,
    EnvironmentSettings,
    EvaluationSettings,
    LearnerSettings,
    LimitSettings,
    RunSettings,
)
from fleetbus.core.training.ledger import Ledger
from fleetbus_schemas import SessionClaimed, SessionEnded, Subjects, Task, encode
from fleetbus_schemas.channels import STORED, WORKERS
from fleetbus_schemas.message import decode_any
from fleetbus_workers.environment.stepwise import orphan_sweep
from fleetbus_workers.gateway.gym_app import GymGateway, GymSettings
from fleetbus_workers.gateway.gym_methods import GymCalls
from fleetbus_workers.gateway.openenv_sessions import OpenEnvSessions
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.pool import GroupPool
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.otlp_file import FileSink
from fleetbus_workers.observe.tracing.run import Tracing
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from tests.support.deployment_member import Member
from tests.support.gym_service import Wire, running
from tests.support.periodic_jobs import RETRIES, HastenedSleeps, find_jobs
from tests.support.processes import until
from tests.support.servers import RunningServers, running_servers
from tests.support.small_deployment import LANES, RUN, SmallDeployment, build_configuration, small_deployment
from tests.unit.test_joined_requests import ASKING, POLICY, request

pytestmark = pytest.mark.timeout(120)

S = Subjects(RUN)
WINDOW_SECONDS = 0.5
LIMITS = LimitSettings(open=1, reset=1, step=1, action=4, verify=1, close=1, idle=0.5, episode=4, grace=0.5, drain=5, late=0.05)

DRIVEN = {
    "every role": {
        "fleetbus.bus.nats.connection:_watch",
        "fleetbus.delivery.worker_lifecycle:run",
        "fleetbus.delivery.worker_lifecycle:_renew",
    },
    "environment": {
        "fleetbus.delivery.leases:run",
        "fleetbus_workers.environment.episode.attempts:watch_late_answers",
        "fleetbus_workers.environment.stepwise.host:_end_expired",
        "fleetbus_workers.environment.stepwise.orphan_sweep:run",
    },
    "learner": {"fleetbus.delivery.requests:close_expired", "fleetbus_workers.learner.joined_requests:follow"},
    "recorder": {
        "fleetbus_workers.recorder.worker:_keep_periodically",
        "fleetbus_workers.recorder.worker:_trim_periodically",
    },
    "gateway": {
        "fleetbus_workers.gateway.gym_app:_expire_idle",
        "fleetbus_workers.gateway.openenv_sessions:run",
    },
    "monitor": {
        "fleetbus_workers.observe.run.run_observer:_poll_usage",
        "fleetbus_workers.observe.run.run_observer:follow_server_view",
    },
}
"""The jobs that the test below waits for, by role."""

JOBS = set().union(*DRIVEN.values())


def test_every_periodic_job_of_the_code_is_driven_with_keys() -> None:
    """Whoever adds one drives it here, or says that it is no more than a pause between two tries."""
    assert find_jobs() == JOBS
    assert not JOBS & RETRIES


class Fleet:
    """All roles on one keyed server."""

    def __init__(self, servers: RunningServers, deployment: SmallDeployment, folder: Path) -> None:
        self.servers = servers
        self.deployment = deployment
        self.folder = folder
        self.observer: RunObserver | None = None

    def start(self) -> list[Member]:
        tasks = [Task(key=f"t{index}", prompt="p", config={"turns": 2}) for index in range(4)]
        curriculum = Curriculum(tasks, tasks, seed=1)
        self.deployment.learner("learner-0", trainer=ScriptedTrainer(), curriculum=curriculum)
        self.deployment.start("recorder", "recorder-0", self._record)
        return list(self.deployment.members.values())

    def start_players(self) -> None:
        self.deployment.inference("inference-0", sampler=ScriptedSampler(delay=lambda _: 0.15))
        self.deployment.environment("environment-0")

    async def _record(self, member: Member, bus: Bus) -> None:
        await run_recorder(
            bus,
            configuration=msgspec.structs.replace(self.deployment.configuration, recorder=ArchiveSettings(keep_bytes=1)),
            name=member.name,
            drain=member.drain,
            folder=self.folder / "archive",
            settings=RecorderSettings(batch_seconds=0.05, settle_seconds=WINDOW_SECONDS),
        )

    async def watch(self) -> None:
        """As `monitor`, `metrics` and an export of traces do."""
        with closing(FileSink(self.folder / "spans.jsonl", run=RUN)) as sink:
            async with self.servers.connect(RUN, "monitor-0") as bus, anyio.create_task_group() as tasks:
                self.observer = RunObserver(bus, S, RunState(steps=3))
                tracing = Tracing(RUN, LogTraces(RUN), [sink])
                tasks.start_soon(tracing.follow, bus, S, anyio.Event())
                tasks.start_soon(self.observer.follow_server_view, lambda: None)
                await self.observer.run()

    async def join(self) -> None:
        """As a learner that trains what another one asks for, and waits for a result that does not come."""
        pool = GroupPool(Ledger(), minimum=2, max_staleness=0, policy=POLICY)
        joined = JoinedRequests(pool, policy=POLICY, requested_by=ASKING, next_group=0, steps=3, limits=LIMITS)
        joined.enter(request(1, 900))
        async with self.servers.connect(RUN, "learner-1") as bus:
            await joined.follow(bus, S)

    @asynccontextmanager
    async def serve_gym(self) -> AsyncIterator[Wire]:
        """A gateway to step-wise sessions, whose clients forget them."""
        settings = GymSettings(session_timeout=0.3)

        @asynccontextmanager
        async def open_calls() -> AsyncIterator[GymCalls]:
            async with self.servers.connect(RUN, "gateway-0") as bus, sessions(bus, S) as client:
                yield GymCalls(client, call_seconds=20)

        async with running(GymGateway(open_calls, settings).application(), seconds=100) as wire:
            yield wire

    async def leave_orphan(self) -> None:
        """The journal of a session whose worker and client are gone."""
        async with self.servers.connect(RUN, "environment-gone") as bus:
            claim = SessionClaimed(session="orphan", attempt=1, worker="environment-gone", nonce="n", task=Task(key="t"))
            await bus.publish(S.session("orphan"), encode(claim), expected_last=0)


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        limits=LIMITS,
        environment=EnvironmentSettings(slots=8, session_slots=4),
        learner=LearnerSettings(steps=3, groups=2, group_size=2, checkpoint_every=1, max_staleness=4),
        evaluation=EvaluationSettings(episodes=2, greedy=False),
    )
    plan = plan_run(RUN, lanes=LANES, max_bytes=1 << 28, duplicate_window_seconds=WINDOW_SECONDS)
    async with running_servers(folder, [plan], form="keyed") as servers:
        await servers.declare(plan)
        connect = partial(servers.connect, RUN)
        async with small_deployment(configuration, connect=connect, published=False, declared=True) as deployment:
            yield Fleet(servers, deployment, folder)


async def raise_what_ends_a_member(deployment: SmallDeployment) -> None:
    await deployment.until(lambda: any(member.error for member in deployment.members.values()))
    raise next(member.error for member in deployment.members.values() if member.error)


async def read_end(bus: Bus, session: str) -> SessionEnded:
    """How the session ended, once it did."""
    async with bus.read([S.session(session)]) as journal:
        while True:
            entry = await journal.receive()
            message = decode_any(STORED["session"], entry.payload, subject=entry.subject)
            if isinstance(message, SessionEnded):
                return message


@pytest.mark.integration
async def test_every_role_outlives_every_periodic_job_with_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphan_sweep, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(nats_bus, "CLOCK_EVERY_SECONDS", 0.2)
    sleeps = HastenedSleeps(monkeypatch)
    with anyio.fail_after(100):
        async with fleet(tmp_path) as driven, anyio.create_task_group() as group:
            deployment, bus = driven.deployment, driven.deployment.bus
            members = driven.start()
            group.start_soon(driven.watch)
            group.start_soon(driven.join)
            group.start_soon(raise_what_ends_a_member, deployment)
            expired = await deployment.all_results(2)  # nobody plays yet: their requester closes them at the deadline
            assert {result.outcome for result in expired} == {"timeout"}
            driven.start_players()
            await driven.leave_orphan()
            async with driven.serve_gym() as wire:
                await wire.connect({}, seed=1)
                unused = OpenEnvSessions(_make_nothing, max_sessions=1, idle_seconds=0.2, resume_seconds=0.2)
                group.start_soon(unused.run)
                assert (await read_end(bus, "orphan")).end == "orphaned"
                await members[0].ended.wait()
                async with bus.read([S.floor]) as floors:
                    await floors.receive()  # the recorder trims
            await until(lambda: all(sleeps.passed[job] >= 2 for job in JOBS))
            assert [member.name for member in deployment.members.values() if member.error] == []
            assert {role for role in WORKERS if role != "gateway"} == {m.role for m in deployment.members.values()}
            assert await driven.servers.violations() == []
            group.cancel_scope.cancel()


def _make_nothing(name: str) -> Any:
    raise AssertionError(name)
