"""Three servers and a replicated log: a fleet trains while a server is killed, and nobody dies while too few are left."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.protocol import publish_command
from fleetbus.bus.streams import tasks_consumer
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, LimitSettings, RunSettings
from fleetbus_schemas import Subjects, Task
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.cluster import cluster, declare_streams, find_leader
from tests.support.small_deployment import RUN, build_configuration, small_deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def test_a_fleet_trains_on_while_the_leader_of_its_log_is_killed(tmp_path: Path) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        limits=LimitSettings(drain=10),  # an election takes up to nine seconds, and no action may time out in it
        learner=LearnerSettings(steps=6, groups=4, group_size=4, checkpoint_every=2, max_staleness=2),
        evaluation=EvaluationSettings(episodes=4),
    )
    tasks = [Task(key=f"task-{index}", prompt=f"task {index}") for index in range(8)]
    trainer = ScriptedTrainer()
    with anyio.fail_after(220):
        async with cluster(tmp_path) as servers:
            await declare_streams(servers)

            def member(name: str) -> AbstractAsyncContextManager[Bus]:
                return connect(servers.url, run=RUN, role=name.partition("-")[0], worker=name)

            async with small_deployment(configuration, connect=member, published=False) as fleet:
                for number in range(2):
                    fleet.environment(f"environment-{number}")
                    fleet.inference(f"inference-{number}")
                learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(tasks, tasks, seed=1))
                await fleet.all_results(12)
                leader = await find_leader(servers)
                await servers.kill(leader)
                await fleet.all_results(40)
                await servers.start(leader)
                await learner.ended.wait()
                report = await audit_run(fleet.bus, fleet.subjects)
    assert report.balanced, report.findings
    assert report.books.trained == len(trainer.trained) == 6 * 4 * 4


async def test_readers_and_pulls_outlive_a_cluster_without_a_quorum(tmp_path: Path) -> None:
    subjects = Subjects(RUN)
    with anyio.fail_after(220):
        async with cluster(tmp_path) as servers:
            await declare_streams(servers)
            alive = f"nats://127.0.0.1:{servers.clients[0]}"
            async with (
                connect(alive, run=RUN, role="look") as bus,
                bus.read([subjects.log]) as reader,
                bus.pull(tasks_consumer("default"), credits=1) as requests,
            ):
                assert isinstance(bus, NatsBus)
                for index in (1, 2):
                    await servers.kill(index)
                question = f"CONSUMER.INFO.fb_{RUN}.{tasks_consumer('default')}"
                while b"temporarily unavailable" not in await query_server(bus, question):  # noqa: ASYNC110  # the servers' own state
                    await anyio.sleep(0.5)
                await anyio.sleep(3)  # long enough for pulls to be found silent, and for the clock to be asked for
                for index in (1, 2):
                    await servers.start(index)
                stored = await bus.publish(subjects.task("default", "e"), b"request", timeout=120)
                assert (await reader.receive()).sequence == stored.sequence
                assert (await requests.receive()).message.sequence == stored.sequence
                assert (await bus.log_state()).last_sequence == stored.sequence


async def test_whoever_stored_an_entry_reads_it_back_whichever_replica_answers(tmp_path: Path) -> None:
    subjects = Subjects(RUN)
    with anyio.fail_after(220):
        async with cluster(tmp_path) as servers:
            await declare_streams(servers)
            for port in servers.clients:
                async with connect(f"nats://127.0.0.1:{port}", run=RUN, role="look") as bus:
                    for number in range(300):
                        subject = subjects.task("default", f"e{port}-{number}")
                        stored = await bus.publish(subject, b"request", expected_last=0)
                        found = await bus.last(subject)
                        assert found is not None
                        assert found.sequence == stored.sequence


async def test_scans_are_whole_while_a_server_that_was_away_catches_up(tmp_path: Path) -> None:
    subjects = Subjects(RUN)
    with anyio.fail_after(220):
        async with cluster(tmp_path) as servers:
            await declare_streams(servers)
            leader = await find_leader(servers)
            away = (leader + 1) % 3
            async with connect(f"nats://127.0.0.1:{servers.clients[leader]}", run=RUN, role="look") as bus:
                await publish_entries(bus, subjects, 0, 4_000)
                await servers.kill(away)
                await publish_entries(bus, subjects, 4_000, 16_000)
                for _ in range(50):
                    await bus.publish(subjects.train("default"), b"entry")
                await servers.start(away)
                with anyio.move_on_after(10):
                    while True:
                        assert len([entry async for entry in bus.scan([subjects.train("default")])]) == 50


async def publish_entries(bus: Bus, subjects: Subjects, start: int, stop: int) -> None:
    room = anyio.Semaphore(64)

    async def publish(number: int) -> None:
        async with room:
            await bus.publish(subjects.action("e0", f"e{number}"), b"x" * 2000)

    async with anyio.create_task_group() as group:
        for number in range(start, stop):
            group.start_soon(publish, number)


async def query_server(bus: NatsBus, question: str) -> bytes:
    """What the server says at this moment, errors included; nothing if it says nothing."""
    connection = bus._connection
    reply = connection.request_mux.new_reply()
    with suppress(TimeoutError):
        return (await connection.request_mux.ask(reply, publish_command(f"$JS.API.{question}", reply, b""), timeout=2))[0]
    return b""
