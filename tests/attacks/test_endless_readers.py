"""The key of a monitor, or of the recorder, makes no consumers without end: those of learner and inference find room."""

from __future__ import annotations

import json
from collections.abc import Generator

import anyio
import pytest

from fleetbus.auth.consumer_names import COUNTED
from fleetbus.auth.folder import AuthFolder
from fleetbus.bus.nats import bus
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from tests.support.backends import asyncio_alone
from tests.support.bare_client import BareClient, bare_client
from tests.support.secured_server import LOG, SUBJECTS, TRUST, SecuredServer, scan, secured_server
from tests.support.small_deployment import LANES

pytestmark = pytest.mark.timeout(120)

anyio_backend = asyncio_alone

MONTH_NS = 30 * 86_400 * 10**9
ATTEMPTS = 300
VIEWERS = 12
LIVES = 3000


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        server.portal.call(_publish_lives, server)
        yield server


async def _publish_lives(server: SecuredServer) -> None:
    async with server.connect("learner") as learner:
        for number in range(LIVES):
            await learner.publish(SUBJECTS.life("learner", f"l{number}"), b"x" * 1000)


def ask_for(name: str, place: str, subject: str = "") -> tuple[str, bytes]:
    config = {"ack_policy": "none", "inactive_threshold": MONTH_NS, "mem_storage": True, **({"name": name} if name else {})}
    if subject:
        config["filter_subject"] = subject
    return f"fbapi.{place}", json.dumps({"stream_name": LOG, "config": config, "action": "create"}).encode()


async def count(admin: BareClient) -> int:
    answer = await admin.ask(f"$JS.API.STREAM.INFO.{LOG}", b"")
    assert answer is not None
    found: int = json.loads(answer.data)["state"]["consumer_count"]
    return found


@pytest.mark.integration
@pytest.mark.parametrize("user", COUNTED)
async def test_no_names_but_its_own_make_a_consumer_and_these_are_counted(
    secured: SecuredServer, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    monkeypatch.setattr(bus, "NAME_SECONDS", 0.2)
    own = AuthFolder(secured.folder).access(plan_run(TRUST, lanes=LANES)).readers[user]
    async with bare_client(secured, user, TRUST) as attacker, bare_client(secured, "admin", TRUST) as admin:
        before = await count(admin)
        for number in range(ATTEMPTS):
            name, mine = f"endless-{number}", own[number % len(own)]
            for asked in (
                ask_for(name, f"CONSUMER.CREATE.{LOG}.{name}"),
                ask_for(name, f"CONSUMER.CREATE.{LOG}.{name}.{SUBJECTS.log}", SUBJECTS.log),
                ask_for(name, f"CONSUMER.CREATE.{LOG}.{mine}"),
                ask_for(name, f"CONSUMER.CREATE.{LOG}.{mine}.{SUBJECTS.log}", SUBJECTS.log),
                ask_for("", f"CONSUMER.CREATE.{LOG}"),
                ask_for("", f"CONSUMER.CREATE.{LOG}.{mine}"),
                ask_for(name, f"CONSUMER.DURABLE.CREATE.{LOG}.{name}"),
            ):
                await attacker.send(*asked)
        await attacker.settle()
        await anyio.sleep(0.3)  # what is created is not always answered
        assert await count(admin) - before <= COUNTED[user]
        for mine in own:
            await attacker.ask(*ask_for(mine, f"CONSUMER.CREATE.{LOG}.{mine}"))
        assert await count(admin) - before == COUNTED[user]
        with pytest.raises(UserError, match="as many readers by this key as it may have"):
            async with secured.connect(user) as monitor:
                await scan(monitor, SUBJECTS.log)
        async with secured.connect("learner") as learner:
            assert await scan(learner, SUBJECTS.log), "everybody else reads"
        for mine in own:
            await attacker.ask(f"fbapi.CONSUMER.DELETE.{LOG}.{mine}", b"")
        assert await count(admin) == before
        async with secured.connect(user) as monitor:
            assert await scan(monitor, SUBJECTS.log)


@pytest.mark.integration
async def test_many_monitors_that_begin_at_once_all_read_the_log(secured: SecuredServer) -> None:
    """Each reads what was before by one reader per filter: together more than there are names."""
    filters = [SUBJECTS.tasks(), SUBJECTS.episodes, SUBJECTS.train("*"), SUBJECTS.policy("*"), SUBJECTS.life("*", "*")]
    assert VIEWERS * len(filters) > COUNTED["monitor"]
    found: list[int] = []

    async def view(number: int) -> None:
        async with secured.connect("monitor", worker=f"monitor-{number}") as monitor:
            found.append(len([entry async for entry in monitor.scan(filters)]))

    async with anyio.create_task_group() as viewers:
        for number in range(VIEWERS):
            viewers.start_soon(view, number)
    assert found == [2 + LIVES] * VIEWERS


@pytest.mark.integration
async def test_a_reader_waits_for_a_name_that_becomes_free(secured: SecuredServer) -> None:
    own = AuthFolder(secured.folder).access(plan_run(TRUST, lanes=LANES)).readers["monitor"]
    async with bare_client(secured, "monitor", TRUST) as other, secured.connect("monitor") as monitor:
        for name in own:
            await other.ask(*ask_for(name, f"CONSUMER.CREATE.{LOG}.{name}"))
        async with monitor.read([SUBJECTS.episodes]) as reader, anyio.create_task_group() as tasks:
            tasks.start_soon(reader.receive)
            await anyio.sleep(0.7)
            for name in own:
                await other.ask(f"fbapi.CONSUMER.DELETE.{LOG}.{name}", b"")
