"""Keys, rights and TLS as `fleetbus auth init` makes them, on a real server: who may do its work, and who may not do what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.audit import audit_run
from fleetbus.auth.access import access_for
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.permissions import USERS
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.errors import NotPermitted, UserError
from schemas import (
    MESSAGES,
    Heartbeat,
    MalformedMessage,
    StepTrained,
    Subjects,
    Task,
    TrainingFinished,
    WorkerFailed,
    decode,
    encode,
)
from schemas.message import decode_any
from tests.support.small_fleet import LANES, RUN, configured, small_fleet
from workers.learner.curriculum import Curriculum
from workers.learner.scripted import ScriptedTrainer
from workers.recorder.worker import run_recorder

TRUST = "trust"
"""The run that forbidden things are tried on."""

SUBJECTS = Subjects(TRUST)
LOG = f"fb_{TRUST}"


class Secured:
    """A server with the configuration that was written, and connections to it as any user."""

    def __init__(self, folder: Path, server: NatsServerProcess, portal: BlockingPortal) -> None:
        self.folder = folder
        self.server = server
        self.portal = portal

    def connect(self, role: str, *, run: str = TRUST, worker: str = "") -> AbstractAsyncContextManager[Bus]:
        access = access_for(role, str(self.folder))
        return connect(self.server.url, run=run, role=role, worker=worker or f"{role}-1", **access)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[Secured]:
    folder, store = tmp_path_factory.mktemp("auth"), tmp_path_factory.mktemp("nats")
    plans = [plan_run(run, lanes=LANES, max_bytes=1 << 28) for run in (TRUST, RUN)]
    files = AuthFolder(folder)
    write_folder(files, plans, hosts=["127.0.0.1"], days=1)
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(run_server(store, config=files.server_config)) as server:
            place = Secured(folder, server, portal)
            portal.call(_declare, place)
            yield place


async def _declare(place: Secured) -> None:
    async with place.connect("init") as bus:
        await bus.declare(plan_run(TRUST, lanes=LANES, max_bytes=1 << 28))
        for subject in (SUBJECTS.task("default", "e0"), SUBJECTS.episode("e0"), SUBJECTS.action("e0", "e0")):
            await bus.publish(subject, b"an entry")


Operation = Callable[[Bus], Awaitable[object]]


def publish(subject: str) -> Operation:
    return lambda bus: bus.publish(subject, b"forged", timeout=20)


def broadcast(subject: str) -> Operation:
    async def operation(bus: Bus) -> None:
        await bus.broadcast(subject, b"forged")
        await anyio.sleep(20)  # ended by the server's refusal

    return operation


def api(subject: str, question: object = None) -> Operation:
    async def operation(bus: Bus) -> None:
        assert isinstance(bus, NatsBus)
        await bus._connection.api.ask(subject, question, timeout=20)

    return operation


def pull(consumer: str) -> Operation:
    async def operation(bus: Bus) -> None:
        async with bus.pull(consumer, credits=1) as subscription:
            await subscription.receive()

    return operation


def listen(subject: str) -> Operation:
    async def operation(bus: Bus) -> None:
        async with bus.listen(subject) as listener:
            await listener.receive()

    return operation


async def scan(bus: Bus, subject: str) -> list[bytes]:
    return [entry.payload async for entry in bus.scan([subject])]


async def direct_history(bus: Bus) -> None:
    from fleetbus.bus.nats.direct import get_histories

    assert isinstance(bus, NatsBus)
    await get_histories(bus._connection, LOG, [SUBJECTS.task("default", "e0")])


SPY = {"stream_name": LOG, "config": {"name": "spy", "filter_subject": SUBJECTS.tasks(), "ack_policy": "none"}}
FORBIDDEN: list[tuple[str, str, Operation]] = [
    ("environment", "publishes a policy", publish(SUBJECTS.policy("default"))),
    ("environment", "writes into the book of training", publish(SUBJECTS.train("default"))),
    ("environment", "requests episodes", publish(SUBJECTS.task("default", "e1"))),
    ("environment", "acts for the policy", publish(SUBJECTS.action("e0", "e1"))),
    ("environment", "takes observations", pull("obs_default_any")),
    ("environment", "trims the log", lambda bus: bus.purge(SUBJECTS.log, below=2)),
    ("environment", "takes an inference lane", publish(SUBJECTS.lane("inference", "i0"))),
    ("inference", "reads tasks", lambda bus: scan(bus, SUBJECTS.tasks())),
    ("inference", "reads the whole log", lambda bus: scan(bus, SUBJECTS.log)),
    ("inference", "reads tasks by direct get", direct_history),
    ("inference", "looks up one task", lambda bus: bus.last(SUBJECTS.task("default", "e0"))),
    ("inference", "takes tasks", pull("task_default")),
    ("inference", "grades episodes", publish(SUBJECTS.episode("e1"))),
    ("inference", "makes observations", publish(SUBJECTS.observation("default", "any", "e1"))),
    ("inference", "publishes a policy", publish(SUBJECTS.policy("default"))),
    ("inference", "changes its own consumer", api(f"CONSUMER.CREATE.{LOG}.obs_default_any", SPY)),
    ("learner", "acts for the policy", publish(SUBJECTS.action("e0", "e1"))),
    ("learner", "takes tasks", pull("task_default")),
    ("learner", "beats as an environment worker", broadcast(SUBJECTS.heartbeat("environment", "environment-1"))),
    ("learner", "deletes the log", api(f"STREAM.DELETE.{LOG}")),
    ("recorder", "publishes a policy", publish(SUBJECTS.policy("default"))),
    ("recorder", "deletes consumers", api(f"CONSUMER.DELETE.{LOG}.task_default")),
    ("monitor", "writes into the log", publish(SUBJECTS.life("monitor", "monitor-1"))),
    ("monitor", "requests episodes", publish(SUBJECTS.task("default", "e1"))),
    ("monitor", "drains workers", broadcast(SUBJECTS.control("environment", "all"))),
    ("monitor", "takes tasks", pull("task_default")),
    ("monitor", "changes consumers", api(f"CONSUMER.CREATE.{LOG}.task_default.{SUBJECTS.tasks()}", SPY)),
    ("monitor", "reads the learner's mail", listen("_INBOX_learner.>")),
    ("gateway", "requests episodes", publish(SUBJECTS.task("default", "e1"))),
    ("gateway", "reads the log", lambda bus: scan(bus, SUBJECTS.log)),
    ("inference", "replaces weights", publish(f"$O.fbweights_{TRUST}.M.bmFtZQ==")),
    ("operator", "publishes a policy", publish(SUBJECTS.policy("default"))),
    ("operator", "makes streams", api("STREAM.CREATE.mine", {"name": "mine", "subjects": ["mine"]})),
]


@pytest.mark.parametrize(
    ("role", "operation"), [(role, op) for role, _, op in FORBIDDEN], ids=[f"{r} {w}" for r, w, _ in FORBIDDEN]
)
async def test_forbidden_is(secured: Secured, role: str, operation: Operation) -> None:
    """The worker that tries ends with an error that names it, its user and the subject."""
    with anyio.fail_after(15), pytest.raises(NotPermitted) as caught:
        async with secured.connect(role, worker="w-17") as bus:
            await operation(bus)
    assert f"{TRUST} {role} w-17: the NATS server does not let the user {role} " in str(caught.value)


async def stored_and_fetched(secured: Secured, folder: Path) -> None:
    """Weights in the run's object bucket: from the learner to the inference worker."""
    (folder / "weights").write_bytes(bytes(300_000))
    async with secured.connect("learner") as learner, secured.connect("inference") as inference:
        assert isinstance(learner, NatsBus) and isinstance(inference, NatsBus)
        await learner.objects(f"fbweights_{TRUST}").put("v1", folder / "weights")
        await inference.objects(f"fbweights_{TRUST}").get("v1", folder / "fetched")
    assert (folder / "fetched").stat().st_size == 300_000


async def test_gateways_drive_sessions_and_workers_answer_as_services(secured: Secured) -> None:
    from fleetbus.client.sessions import SessionClient
    from fleetbus.micro import Microservice
    from workers.environment.scripted import ScriptedEnvironment
    from workers.environment.worker import run_environment

    configuration, drain = configured(run=RunSettings(name=TRUST)), anyio.Event()
    with anyio.fail_after(40):
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
                assert (await session.make("reset")).refusal == ""
                assert (await session.make("step", text="done")).refusal == ""
            for role in ("environment", "gateway"):
                answer = await monitor.request(f"$SRV.PING.fleetbus-{role}", b"", timeout=10)
                assert f"fleetbus-{role}".encode() in answer
            drain.set()
            group.cancel_scope.cancel()


async def test_what_is_forbidden_to_some_works_for_those_whose_work_it_is(secured: Secured, tmp_path: Path) -> None:
    with anyio.fail_after(20):
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
        async with secured.connect("monitor") as bus:
            assert b"policy" in await scan(bus, SUBJECTS.log)
            assert await bus.consumer_floors()


async def test_histories_read_narrowly_are_those_that_are_read_at_once(secured: Secured) -> None:
    """An inference worker rebuilds an episode from the log without the right to read all of it."""
    subjects = [SUBJECTS.action("e0", "h"), SUBJECTS.action("e1", "h"), SUBJECTS.episode("h"), SUBJECTS.episode("none")]
    with anyio.fail_after(20):
        async with secured.connect("up") as admin:
            for number in range(7):
                await admin.publish(subjects[number % 3], b"%d" % number)
            async with secured.connect("inference") as narrow:
                found = await narrow.history(subjects)
            assert found == await admin.history(subjects)
    assert [entry.payload for entry in found] == [b"%d" % number for number in range(7)]


async def test_what_a_reader_can_smuggle_into_the_log_is_no_message(secured: Secured) -> None:
    """A question may name a subject of the log as the place for its answer; see docs/decisions/0080."""
    from fleetbus.bus.nats.protocol import publish_command

    creation = {"stream_name": LOG, "config": {"name": "own", "ack_policy": "none", "filter_subject": SUBJECTS.episode("e0")}}
    questions = (f"STREAM.INFO.{LOG}", f"DIRECT.GET.{LOG}.{SUBJECTS.episode('e0')}", f"CONSUMER.MSG.NEXT.{LOG}.own")
    with anyio.fail_after(20):
        async with secured.connect("monitor") as bus:
            assert isinstance(bus, NatsBus)
            before = await bus.last_sequence()
            await bus._connection.api.ask(f"CONSUMER.CREATE.{LOG}.own", creation)
            for question in questions:
                bus._connection.wire.send(publish_command(f"$JS.API.{question}", SUBJECTS.policy("forged"), b""))
            async with bus.read([SUBJECTS.policy("forged")], start=before + 1) as reader:
                smuggled = [await reader.receive()]
                with anyio.move_on_after(1):
                    smuggled.append(await reader.receive())
    assert len(smuggled) == 1
    with pytest.raises(MalformedMessage):
        decode_any(MESSAGES, smuggled[0].payload)


async def test_a_fleet_trains_with_the_rights_of_its_roles_alone(secured: Secured, tmp_path: Path) -> None:
    """Real workers with the keys of their roles; an inference worker dies, its episodes are rebuilt by the other one."""
    configuration = configured(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=3, groups=4, group_size=4, checkpoint_every=2, max_staleness=2),
        evaluation=EvaluationSettings(episodes=4),
    )

    def member(name: str) -> AbstractAsyncContextManager[Bus]:
        return secured.connect("up" if name == "test" else name.partition("-")[0], run=RUN, worker=name)

    tasks = [Task(key=f"task-{index}", prompt=f"task {index}") for index in range(8)]
    trainer = ScriptedTrainer()
    with anyio.fail_after(50):
        async with small_fleet(configuration, connect=member, published=False) as fleet:

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


async def test_a_worker_without_a_right_says_so_in_the_log_by_name(secured: Secured, tmp_path: Path) -> None:
    """An environment worker whose key was mixed up with the recorder's: it may say who it is not, so its own words tell."""
    from workers.environment.scripted import ScriptedEnvironment
    from workers.environment.worker import run_environment

    configuration = configured(run=RunSettings(name=TRUST, folder=str(tmp_path)))
    error: BaseException | None = None
    with anyio.fail_after(20):
        try:
            access = access_for("recorder", str(secured.folder))
            async with connect(secured.server.url, run=TRUST, role="environment", worker="mixed-up", **access) as bus:
                await run_environment(
                    bus, configuration=configuration, name="mixed-up", drain=anyio.Event(), make=ScriptedEnvironment
                )
        except BaseException as caught:
            error = caught
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, NotPermitted)
    assert "environment mixed-up: the NATS server does not let the user recorder" in str(error)


async def test_an_operation_that_is_refused_midway_stands_in_the_log_under_the_workers_name(secured: Secured) -> None:
    from fleetbus.presence import Presence, present

    with anyio.fail_after(20):
        with pytest.RaisesGroup(NotPermitted):
            async with secured.connect("environment", worker="env-9") as bus:
                beat = Heartbeat(role="environment", worker="env-9")
                presence = Presence(bus, SUBJECTS, role="environment", worker="env-9", beat=lambda: beat, lane=None)
                async with present(presence, bus, None, slots=1):
                    await bus.publish(SUBJECTS.policy("default"), b"forged", timeout=10)
        async with secured.connect("monitor") as bus:
            last = await bus.last(SUBJECTS.life("environment", "env-9"))
    assert last is not None
    failed = decode(WorkerFailed, last.payload)
    assert (failed.worker, failed.error_class) == ("env-9", "NotPermitted")
    assert SUBJECTS.policy("default") in failed.error


async def test_without_a_key_nobody_gets_in(secured: Secured) -> None:
    access = access_for("monitor", str(secured.folder))
    with pytest.raises(UserError, match="refused the credentials"):
        async with connect(secured.server.url, run=TRUST, tls=access["tls"]):
            raise AssertionError
    with pytest.raises(UserError, match="speaks TLS: give --nats-auth"):
        async with connect(secured.server.url, run=TRUST):
            raise AssertionError


async def test_a_key_of_another_fleet_is_refused_and_so_is_its_server(secured: Secured, tmp_path: Path) -> None:
    write_folder(AuthFolder(tmp_path), [plan_run(TRUST)], hosts=["127.0.0.1"], days=1)
    with pytest.raises(UserError, match="is not the one that was expected"):
        async with connect(secured.server.url, run=TRUST, **access_for("monitor", str(tmp_path))):
            raise AssertionError
    (tmp_path / "ca.pem").write_bytes((secured.folder / "ca.pem").read_bytes())
    with pytest.raises(UserError, match="refused the credentials"):
        async with connect(secured.server.url, run=TRUST, **access_for("monitor", str(tmp_path))):
            raise AssertionError


async def test_a_client_with_keys_says_nothing_in_the_clear(secured: Secured) -> None:
    """Whoever stands in for the server and claims to speak no TLS hears the beginning of a handshake and nothing else."""
    heard = bytearray()

    async def impostor(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
            with anyio.move_on_after(5):
                async for chunk in stream:
                    heard.extend(chunk)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, impostor)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(UserError):
            async with connect(f"nats://127.0.0.1:{port}", run=TRUST, **access_for("monitor", str(secured.folder))):
                raise AssertionError
        tasks.cancel_scope.cancel()
    assert heard[:1] == b"\x16"  # a TLS handshake record
    assert b"CONNECT" not in heard and b"PUB" not in heard


def test_secrets_are_readable_by_their_owner_alone_and_stand_in_no_other_file(secured: Secured) -> None:
    secrets = [(secured.folder / f"{user}.nk").read_bytes() for user in USERS]
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in secured.folder.iterdir()} == {
        **{f"{user}.nk": "0o600" for user in USERS},
        "server-key.pem": "0o600",
        "ca.pem": "0o644",
        "server.pem": "0o644",
        "nats-server.conf": "0o644",
    }
    files = [file for file in secured.folder.iterdir() if file.suffix != ".nk"]
    assert [file.name for file in files for secret in secrets if secret in file.read_bytes()] == []
    assert [secret for secret in secrets if secret in (secured.server.store / "nats-server.log").read_bytes()] == []


def test_writing_again_keeps_keys_and_certificates_and_allows_the_new_run(tmp_path: Path) -> None:
    folder = AuthFolder(tmp_path)
    first = write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    second = write_folder(folder, [plan_run("a", lanes=1), plan_run("b", lanes=1)], hosts=["localhost"], days=1)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(first.keys) == set(USERS) and first.certificates
    assert second.keys == () and not second.certificates
    assert [name for name in before if before[name] != after[name]] == ["nats-server.conf"]
    assert b"fb.b.task.*.*" in after["nats-server.conf"] and b"fb.b.task.*.*" not in before["nats-server.conf"]


def test_a_folder_that_lacks_something_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    folder = AuthFolder(tmp_path)
    with pytest.raises(UserError, match=r"no certificate authority at .*ca\.pem"):
        access_for("monitor", str(tmp_path))
    write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    folder.key("monitor").unlink()
    with pytest.raises(UserError, match=r"no key of the user monitor at .*monitor\.nk"):
        access_for("top", str(tmp_path))
    folder.authority.unlink()
    with pytest.raises(UserError, match=r"lacks ca\.pem"):
        write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    secret = "S" + "A" * 20
    folder.key("learner").write_text(secret)
    folder.authority.write_text("x")
    with pytest.raises(UserError, match="holds no nkey seed") as caught:
        write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    assert secret not in str(caught.value)


def test_without_a_folder_nothing_is_asked() -> None:
    assert access_for("learner", "") == {}
    assert msgspec.structs.asdict(RunSettings())["name"] == "default"
    assert encode(Heartbeat(role="monitor", worker="m"))
