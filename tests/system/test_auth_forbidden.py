"""Operations that no user of a run may do but the one whose work it is: refused by a real server, and named."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import anyio
import anyio.abc
import pytest

from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.config.settings import RunSettings
from fleetbus.errors import NotPermitted
from fleetbus_schemas import Heartbeat, Subjects, WorkerFailed, decode
from tests.support.secured_server import LOG, SUBJECTS, TRUST, SecuredServer, scan, secured_server
from tests.support.small_deployment import RUN, build_configuration


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


Operation = Callable[[Bus], Awaitable[object]]


def publish(subject: str) -> Operation:
    return lambda bus: bus.publish(subject, b"forged", timeout=20)


def broadcast(subject: str) -> Operation:
    async def operation(bus: Bus) -> None:
        await bus.broadcast(subject, b"forged")
        await anyio.sleep_forever()  # ended by the server's refusal

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


async def direct_history(bus: Bus) -> None:
    from fleetbus.bus.nats.direct import get_histories

    assert isinstance(bus, NatsBus)
    await get_histories(bus._connection, LOG, [SUBJECTS.task("default", "e0")])


SPY = {"stream_name": LOG, "config": {"name": "spy", "filter_subject": SUBJECTS.tasks(), "ack_policy": "none"}}
FORBIDDEN: list[tuple[str, str, Operation]] = [
    ("environment", "publishes a policy", publish(SUBJECTS.policy("default"))),
    ("environment", "writes into the training journal", publish(SUBJECTS.train("default"))),
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
    ("recorder", "deletes the log", api(f"STREAM.DELETE.{LOG}")),
    ("recorder", "lends out consumers' work", api(f"CONSUMER.RESET.{LOG}.task_default")),
    ("monitor", "writes into the log", publish(SUBJECTS.life("monitor", "monitor-1"))),
    ("monitor", "requests episodes", publish(SUBJECTS.task("default", "e1"))),
    ("monitor", "drains workers", broadcast(SUBJECTS.control("environment", "all", "drain"))),
    ("gateway", "drains environment workers", broadcast(SUBJECTS.control("environment", "all", "drain"))),
    ("gateway", "cancels episodes of its own accord", broadcast(SUBJECTS.control("environment", "w", "cancel"))),
    ("environment", "drains inference workers", broadcast(SUBJECTS.control("inference", "all", "drain"))),
    ("environment", "pauses the learner", broadcast(SUBJECTS.control("learner", "all", "pause"))),
    ("monitor", "takes tasks", pull("task_default")),
    ("monitor", "learns the names of consumers", api(f"CONSUMER.LIST.{LOG}")),
    ("monitor", "writes into another run", publish(Subjects(RUN).episode("e1"))),
    ("environment", "writes into another run", publish(Subjects(RUN).episode("e1"))),
    ("monitor", "reads the learner's mail", listen("_INBOX_learner.>")),
    ("gateway", "requests episodes", publish(SUBJECTS.task("default", "e1"))),
    ("gateway", "fills the log with greetings", publish(SUBJECTS.life("gateway", "w"))),
    ("gateway", "reads the log", lambda bus: scan(bus, SUBJECTS.log)),
    ("inference", "replaces weights", publish(f"$O.fbweights_{TRUST}.M.bmFtZQ==")),
    ("environment", "replaces weights", publish(f"$O.fbweights_{TRUST}.M.bmFtZQ==")),
    ("environment", "spoils parts of weights", publish(f"$O.fbweights_{TRUST}.C.part")),
    ("environment", "removes weights", api(f"STREAM.PURGE.OBJ_fbweights_{TRUST}", {})),
    ("environment", "reads weights", api(f"DIRECT.GET.OBJ_fbweights_{TRUST}.$O.fbweights_{TRUST}.M.bmFtZQ==")),
    ("gateway", "reads weights", api(f"DIRECT.GET.OBJ_fbweights_{TRUST}.$O.fbweights_{TRUST}.M.bmFtZQ==")),
    ("environment", "removes images", api(f"STREAM.PURGE.OBJ_fbimages_{TRUST}", {})),
    ("learner", "stores images", publish(f"$O.fbimages_{TRUST}.M.bmFtZQ==")),
    ("monitor", "reads images", api(f"DIRECT.GET.OBJ_fbimages_{TRUST}.$O.fbimages_{TRUST}.M.bmFtZQ==")),
    ("operator", "publishes a policy", publish(SUBJECTS.policy("default"))),
    ("operator", "makes streams", api("STREAM.CREATE.mine", {"name": "mine", "subjects": ["mine"]})),
]


@pytest.mark.parametrize(
    ("role", "operation"), [(role, op) for role, _, op in FORBIDDEN], ids=[f"{r} {w}" for r, w, _ in FORBIDDEN]
)
async def test_forbidden_is(secured: SecuredServer, role: str, operation: Operation) -> None:
    """The worker that tries ends with an error that names it, its user and the subject."""
    with anyio.fail_after(50), pytest.raises(NotPermitted) as caught:
        async with secured.connect(role, worker="w-17") as bus:
            await operation(bus)
    assert f"{TRUST} {role} w-17: the NATS server does not let the user {role} " in str(caught.value)


async def test_a_worker_without_a_right_says_so_in_the_log_by_name(secured: SecuredServer, tmp_path: Path) -> None:
    """An environment worker whose key was mixed up with the recorder's: it may say who it is not, so its own words tell."""
    from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
    from fleetbus_workers.environment.worker import run_environment

    configuration = build_configuration(run=RunSettings(name=TRUST, folder=str(tmp_path)))
    error: BaseException | None = None
    with anyio.fail_after(50):
        try:
            access = build_access("recorder", str(secured.folder), TRUST)
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


async def test_an_operation_that_is_refused_midway_stands_in_the_log_under_the_workers_name(secured: SecuredServer) -> None:
    from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle

    with anyio.fail_after(50):
        with pytest.RaisesGroup(NotPermitted):
            async with secured.connect("environment", worker="env-9") as bus:
                beat = Heartbeat(role="environment", worker="env-9")
                lifecycle = WorkerLifecycle(bus, SUBJECTS, role="environment", worker="env-9", beat=lambda: beat, lane=None)
                async with run_lifecycle(lifecycle, bus, None, slots=1):
                    await bus.publish(SUBJECTS.policy("default"), b"forged", timeout=10)
        async with secured.connect("monitor") as bus:
            last = await bus.last(SUBJECTS.life("environment", "env-9"))
    assert last is not None
    failed = decode(WorkerFailed, last.payload)
    assert (failed.worker, failed.error_class) == ("env-9", "NotPermitted")
    assert SUBJECTS.policy("default") in failed.error
