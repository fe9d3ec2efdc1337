"""Every role does its work with its own key and the least rights, over TLS, on a real server."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.streams import plan_run
from fleetbus.client.sessions import SessionClient
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.errors import NoResponders
from fleetbus_schemas import StepTrained, Task, TrainingFinished
from fleetbus_schemas.channels import WORKERS
from fleetbus_schemas.message import decode_any
from fleetbus_workers.gateway.openenv_episode import OpenEnvEpisode
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.recorder.worker import run_recorder
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, scan, secured_server
from tests.support.small_deployment import LANES, RUN, build_configuration, small_deployment


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


async def stored_and_fetched(secured: SecuredServer, folder: Path) -> None:
    """Weights in the run's object bucket: from the learner to the inference worker."""
    (folder / "weights").write_bytes(bytes(300_000))
    async with secured.connect("learner") as learner, secured.connect("inference") as inference:
        assert isinstance(learner, NatsBus) and isinstance(inference, NatsBus)
        await learner.objects(f"fbweights_{TRUST}").put("v1", folder / "weights")
        await inference.objects(f"fbweights_{TRUST}").get("v1", folder / "fetched")
    assert (folder / "fetched").stat().st_size == 300_000


async def test_gateways_drive_sessions_and_workers_answer_as_services(secured: SecuredServer) -> None:
    from fleetbus.delivery.service_api import Microservice
    from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
    from fleetbus_workers.environment.worker import run_environment

    configuration, drain = build_configuration(run=RunSettings(name=TRUST)), anyio.Event()
    with anyio.fail_after(50):
        async with (
            secured.connect("environment") as worker,
            secured.connect("gateway") as gateway,
            secured.connect("monitor") as monitor,
            anyio.create_task_group() as group,
        ):
            run = partial(run_environment, worker, configuration=configuration, name="environment-1", drain=drain)
            group.start_soon(partial(run, make=ScriptedEnvironment))
            for bus, role in ((worker, "environment"), (gateway, "gateway")):
                group.start_soon(Microservice(bus, SUBJECTS, role=role, worker=f"{role}-1").run)
            client = SessionClient(gateway, SUBJECTS)
            group.start_soon(client.run)
            async with client.open(Task(key="t"), timeout=30) as session:
                assert (await session.request("reset")).refusal == ""
                assert (await session.request("step", text="done")).refusal == ""
                await follows_a_named_session(SessionClient(gateway, SUBJECTS), client)
            for role in ("environment", "gateway"):
                answer = await monitor.request(f"$SRV.PING.fleetbus-{role}", b"", timeout=10)
                assert f"fleetbus-{role}".encode() in answer
            drain.set()
            group.cancel_scope.cancel()


def test_callers_in_threads_use_the_key_of_a_gateway(secured: SecuredServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyio.from_thread import start_blocking_portal

    from fleetbus.client.blocking import open_client

    monkeypatch.setenv("FLEETBUS_NATS_AUTH", str(secured.folder))
    with start_blocking_portal("asyncio") as portal, open_client(portal, secured.server.url, TRUST) as client:
        assert portal.call(client.bus.history, [SUBJECTS.session("nobody")]) == []


async def follows_a_named_session(newcomer: SessionClient, client: SessionClient) -> None:
    """As an OpenEnv gateway does: the session of a client, gone on with by another gateway."""
    begun = OpenEnvEpisode(client, capacity_seconds=30, call_seconds=30, name="named")
    await begun.reset({})
    followed = OpenEnvEpisode(newcomer, capacity_seconds=30, call_seconds=30, name="named")
    assert await followed.attach()
    assert (await followed.step({"text": "go on"}))["done"] is False
    await followed.close()


@pytest.mark.integration
async def test_what_is_forbidden_to_some_works_for_those_whose_work_it_is(secured: SecuredServer, tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with secured.connect("learner") as bus:
            await bus.publish(SUBJECTS.policy("default"), b"policy")
            await bus.publish(SUBJECTS.train("default"), b"training")
            await bus.publish(SUBJECTS.task("default", "e1"), b"task")
        async with secured.connect("environment") as bus, bus.pull("task_default", credits=1) as tasks:
            await (await tasks.receive()).ack()
            await bus.publish(SUBJECTS.observation("default", "any", "e1"), b"observation")
            await bus.publish(SUBJECTS.episode("e1"), b"result")
        async with secured.connect("inference") as bus, bus.pull("obs_default_any", credits=1) as observations:
            await (await observations.receive()).ack()
            await bus.publish(SUBJECTS.action("e0", "e1"), b"action")
            await stored_and_fetched(secured, tmp_path)
        async with secured.connect("recorder") as bus:
            await bus.purge(SUBJECTS.observations(), below=2)
            floors = {floor.name.rpartition("-")[0]: floor.ack_floor for floor in await bus.ack_floors()}
            assert floors["task_default"] > 0 and floors.keys() == {
                each.name for each in plan_run(TRUST, lanes=LANES).consumers
            }
        async with secured.connect("monitor") as bus:
            assert b"policy" in await scan(bus, SUBJECTS.log)


async def test_histories_read_narrowly_are_those_that_are_read_at_once(secured: SecuredServer) -> None:
    """An inference worker rebuilds an episode from the log without the right to read all of it."""
    subjects = [SUBJECTS.action("e0", "h"), SUBJECTS.action("e1", "h"), SUBJECTS.episode("h"), SUBJECTS.episode("none")]
    with anyio.fail_after(50):
        async with secured.connect("up") as admin:
            for number in range(7):
                await admin.publish(subjects[number % 3], b"%d" % number)
            async with secured.connect("inference") as narrow:
                found = await narrow.history(subjects)
            assert found == await admin.history(subjects)
    assert [entry.payload for entry in found] == [b"%d" % number for number in range(7)]


@pytest.mark.integration
async def test_a_fleet_trains_with_the_rights_of_its_roles_alone(secured: SecuredServer, tmp_path: Path) -> None:
    """Real workers with the keys of their roles; an inference worker dies, its episodes are rebuilt by the other one."""
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=3, groups=4, group_size=4, checkpoint_every=2, max_staleness=2),
        evaluation=EvaluationSettings(episodes=4),
    )

    def member(name: str) -> AbstractAsyncContextManager[Bus]:
        return secured.connect("up" if name == "test" else name.partition("-")[0], run=RUN, worker=name)

    tasks = [Task(key=f"task-{index}", prompt=f"task {index}") for index in range(8)]
    trainer = ScriptedTrainer()
    with anyio.fail_after(50):
        async with small_deployment(configuration, connect=member, published=False) as fleet:

            async def record(_member: object, bus: Bus) -> None:
                drain = fleet.members["recorder-0"].drain
                await run_recorder(
                    bus, configuration=configuration, name="recorder-0", drain=drain, folder=tmp_path / "archive"
                )

            fleet.start("recorder", "recorder-0", record)
            for number in range(2):
                fleet.environment(f"environment-{number}")
                fleet.inference(f"inference-{number}")
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(tasks, tasks, seed=1))
            await fleet.all_results(12)
            fleet.members["inference-0"].kill()
            await learner.ended.wait()
            entries = [entry async for entry in fleet.bus.scan([fleet.subjects.train("default")])]
            async with secured.connect("audit", run=RUN) as monitor:
                report = await audit_run(monitor, fleet.subjects)
    kinds = (StepTrained, TrainingFinished)
    found = [decoded for entry in entries if (decoded := _one_of(kinds, entry.payload)) is not None]
    assert [type(message) for message in found].count(StepTrained) == 3
    assert isinstance(found[-1], TrainingFinished)
    assert report.balanced, report.findings
    assert report.books.trained == len(trainer.trained) == 3 * 4 * 4


def _one_of(kinds: tuple[type, ...], payload: bytes) -> object:
    try:
        return decode_any(kinds, payload)
    except ValueError:
        return None


@pytest.mark.parametrize("role", ["up", "monitor", "operator"])
async def test_who_looks_on_hears_the_heartbeats_of_every_role(secured: SecuredServer, role: str) -> None:
    """Each comes from another account."""
    heard: set[str] = set()
    with anyio.fail_after(50):
        async with secured.connect(role) as bus, bus.listen(SUBJECTS.heartbeats) as heartbeats, AsyncExitStack() as stack:
            for worker in WORKERS:
                speaker = await stack.enter_async_context(secured.connect(worker))
                await speaker.broadcast(SUBJECTS.heartbeat(worker, "w"), b"beat")
            while heard < set(WORKERS):
                heard.add((await heartbeats.receive())[0].split(".")[2])


@pytest.mark.parametrize(
    ("caller", "subject"),
    [
        ("environment", SUBJECTS.control("inference", "gone", "ping")),
        ("gateway", SUBJECTS.rpc("gone", "s")),
        ("gateway", SUBJECTS.control("environment", "gone", "ping")),
        ("operator", SUBJECTS.control("learner", "gone", "drain")),
    ],
)
async def test_a_call_to_a_worker_that_is_gone_fails_at_once_across_accounts(
    secured: SecuredServer, caller: str, subject: str
) -> None:
    with anyio.fail_after(10):
        async with secured.connect(caller) as bus:
            with pytest.raises(NoResponders):
                await bus.request(subject, b"ping", timeout=60)
