"""Entries that are archived and settled leave the log, and nothing of them runs again: in memory and on a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus.client.sessions import sessions
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EpisodeSettings,
    EvaluationSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.core.training.floor import parse_group_number
from fleetbus.log.archive_reader import read_archive
from fleetbus_schemas import EpisodeRequested, FloorRaised, SessionAnswer, SessionCall, Subjects, Task, decode, encode
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.gateway.openenv_episode import OpenEnvEpisode
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from tests.support.connections import Connect, connections_to

S = Subjects("settled")
STEPS, GROUPS, GROUP_SIZE = 8, 2, 2


@pytest.fixture(params=["memory", "nats"])
async def connections(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    async with connections_to(request.param, "settled", tmp_path) as connect:
        yield connect


class Deployment:
    """Workers with a recorder that lets little time pass before what is settled leaves."""

    def __init__(self, connections: Connect, folder: Path) -> None:
        self._connections = connections
        self.archive = folder / "archive"
        self.drain = anyio.Event()
        self.opened: list[str] = []
        self.configuration = Configuration(
            run=RunSettings(name="settled", folder=str(folder)),
            nats=NatsSettings(lanes=4),
            learner=LearnerSettings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, checkpoint_every=1),
            episode=EpisodeSettings(max_turns=2),
            evaluation=EvaluationSettings(episodes=0),
            environment=EnvironmentSettings(session_slots=4),
            limits=LimitSettings(drain=0.5),
        )

    def make(self) -> ScriptedEnvironment:
        opened = self.opened

        class Counted(ScriptedEnvironment):
            async def open(self, task: Task) -> None:
                opened.append(task.key)
                await super().open(task)

        return Counted()

    async def play(self) -> None:
        async with self._connections("environment") as bus:
            await run_environment(bus, configuration=self.configuration, name="environment", drain=self.drain, make=self.make)

    async def infer(self) -> None:
        async with self._connections("inference") as bus:
            await run_inference(
                bus, configuration=self.configuration, name="inference", drain=self.drain, sampler=ScriptedSampler(),
                template=ScriptedTemplate(),
            )  # fmt: skip

    async def train(self) -> None:
        tasks = [Task(key=f"t{index}", prompt="p", config={"turns": 2}) for index in range(4)]
        async with self._connections("learner") as bus:
            await run_learner(
                bus, configuration=self.configuration, name="learner", drain=anyio.Event(), trainer=ScriptedTrainer(),
                curriculum=Curriculum(tasks, tasks, seed=1),
            )  # fmt: skip

    async def record(self, drain: anyio.Event) -> None:
        settings = RecorderSettings(batch_seconds=0.05, trim_seconds=0.1, settle_seconds=0.2)
        async with self._connections("recorder") as bus:
            await run_recorder(
                bus, configuration=self.configuration, name="recorder", drain=drain, folder=self.archive, settings=settings
            )


async def declare(bus: Bus) -> None:
    await bus.declare(plan_run("settled", lanes=4, duplicate_window_seconds=0.2))


async def wait_until_gone(bus: Bus, subject: str) -> None:
    while await bus.list_subjects(subject):  # noqa: ASYNC110  # the server tells nobody of a purge
        await anyio.sleep(0.05)


async def wait_until_acked(connections: Connect, consumer: str, sequence: int) -> None:
    async with connections("environment-asking") as bus:
        while (await bus.ack_floors([consumer]))[0].ack_floor < sequence:  # noqa: ASYNC110  # nor of an ack
            await anyio.sleep(0.05)


async def read_kept(bus: Bus) -> dict[str, list[StreamEntry]]:
    kept: dict[str, list[StreamEntry]] = {}
    async for entry in bus.scan([S.log]):
        kept.setdefault(entry.subject.split(".")[2], []).append(entry)
    return kept


@pytest.mark.integration
@pytest.mark.timeout(120)
async def test_what_is_settled_leaves_the_log_and_late_copies_of_it_are_not_played(
    connections: Connect, tmp_path: Path
) -> None:
    with anyio.fail_after(100):
        async with connections("test") as bus, anyio.create_task_group() as group:
            await declare(bus)
            deployment, recorded = Deployment(connections, tmp_path), anyio.Event()
            for work in (deployment.play, deployment.infer):
                group.start_soon(work)
            group.start_soon(deployment.record, recorded)
            await deployment.train()
            await wait_until_gone(bus, S.episode("g000000-0"))
            await wait_until_gone(bus, S.task("*", "g000005-1"))
            kept = await read_kept(bus)
            groups = {entry.subject.rpartition(".")[2].rpartition("-")[0] for entry in kept.get("task", [])}
            assert all(parse_group_number(group_id) > 5 for group_id in groups)

            before = len(deployment.opened)
            wanted = (S.task("default", "g000000-0"), S.task("default", "g000002-1"))
            copies = [entry for entry in read_archive(deployment.archive, run="settled") if entry.subject in wanted]
            for entry in copies:
                last = await bus.publish(entry.subject, entry.payload, expected_last=0)
            assert len(copies) == 2
            await wait_until_acked(connections, tasks_consumer("default"), last.sequence)
            assert len(deployment.opened) == before
            deployment.drain.set()
            await anyio.sleep(0.3)
            recorded.set()
        async with connections("test") as bus:
            report = await audit_run(bus, S, archive=deployment.archive)
    assert report.findings == ()
    assert report.refused >= 2
    assert report.books.trained == STEPS * GROUPS * GROUP_SIZE
    assert report.books.requested == report.books.accounted


async def test_a_worker_that_held_a_request_while_its_episode_left_the_log_does_not_play_it(
    connections: Connect, tmp_path: Path
) -> None:
    with anyio.fail_after(50):
        async with connections("test") as bus, anyio.create_task_group() as group:
            await declare(bus)
            deployment = Deployment(connections, tmp_path)
            request = EpisodeRequested(
                episode_id="e1", group_id="g", sample_index=0, split="eval", task=Task(key="t"), policy="default",
                deadline_ns=bus.now_ns() + 10**12,
            )  # fmt: skip
            held = await bus.publish(S.task("default", "e1"), encode(request), expected_last=0)
            await bus.publish(S.floor, encode(FloorRaised(sequence=held.sequence + 1)), expected_last=0)
            group.start_soon(deployment.play)
            await wait_until_acked(connections, tasks_consumer("default"), held.sequence)
            assert deployment.opened == []
            assert len(await bus.history([S.episode("e1")])) == 1  # the claim, which the audit passes over
            deployment.drain.set()


@pytest.mark.integration
async def test_journals_of_ended_sessions_leave_the_log_and_an_open_one_stays(connections: Connect, tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with connections("test") as bus, anyio.create_task_group() as group:
            await declare(bus)
            deployment, recorded = Deployment(connections, tmp_path), anyio.Event()
            group.start_soon(deployment.play)
            group.start_soon(deployment.record, recorded)
            async with connections("operator") as operator, sessions(operator, S) as client:
                async with client.open(Task(key="t", config={"turns": 9}), session="open") as first:
                    await first.reset()
                    for number in range(3):
                        async with client.open(Task(key="t", config={"turns": 2}), session=f"s{number}") as session:
                            await session.reset()
                            await session.step("x")
                    for number in range(3):
                        await wait_until_gone(bus, S.session(f"s{number}"))
                    assert [entry.subject for entry in await bus.history([S.session("open")])]
                    await first.step("x")
                    late = SessionCall(session="s1", call="open", key="0", task=Task(key="t"), earliest_sequence=1)
                    subject = S.rpc("environment", "s1")
                    answer = decode(SessionAnswer, await operator.request(subject, encode(late), timeout=5), subject=subject)
                    assert (answer.refusal, "left the log" in answer.error) == ("closed", True)
            recorded.set()
            deployment.drain.set()


async def test_the_number_of_a_named_openenv_session_is_found_when_its_earlier_episodes_have_left(connections: Connect) -> None:
    async with connections("test") as bus:
        await declare(bus)
        for name in ("n-0", "n-1", "n-2", "n-x", "m-7"):
            await bus.publish(S.session(name), b"x")
        await bus.purge(S.session("*"), below=3)
        client = SimpleNamespace(bus=bus, subjects=S)
        episode = cast(OpenEnvEpisode, SimpleNamespace(name="n", _client=client))
        assert await OpenEnvEpisode._find_last_number(episode) == 2
        assert await OpenEnvEpisode._find_last_number(cast(OpenEnvEpisode, SimpleNamespace(name="o", _client=client))) == -1
