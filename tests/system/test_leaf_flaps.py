"""The link of a leaf node breaks while workers stay connected to the leaf node: nobody tells them, and what was under way is
lost. Readers miss nothing; work and its credits come back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.leaf_config import LEAF_PORT
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect, pull_requests
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus_schemas import Subjects
from tests.support.leaf_server import leaf_server
from tests.support.ports import free_ports
from tests.support.relay import Relay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

RUN = "sites"
PLAN = plan_run(RUN, lanes=2, max_bytes=1 << 28)
S = Subjects(RUN)
CREDITS, BUSY = 4, 2
RELINKED_SECONDS = 2.5


class Place:
    """``near`` is connected to the run's server, ``far`` to a leaf node behind ``link``."""

    def __init__(self, near: Bus, far: Bus, link: Relay) -> None:
        self.near = near
        self.far = far
        self.link = link

    @asynccontextmanager
    async def losing(self) -> AsyncIterator[None]:
        """What the server sends to the leaf node in the block is lost; the link is back after it."""
        await self.link.hold_answers()
        yield
        await anyio.sleep(0.2)  # until the relay has it
        await self.link.cut()
        await self.link.mend()


@asynccontextmanager
async def place(folder: Path, role: str) -> AsyncIterator[Place]:
    keys, (port,) = AuthFolder(folder / "keys"), free_ports(1)
    write_folder(keys, [PLAN], hosts=["127.0.0.1"], days=1, leaf_roles=[role])
    text = keys.server_config.read_text().replace(f"0.0.0.0:{LEAF_PORT}", f"127.0.0.1:{port}")
    keys.server_config.write_text(text)
    async with (
        run_server(folder / "nats", config=keys.server_config) as server,
        connect(server.url, run=RUN, role="init", **build_access("init", str(keys.path), RUN)) as near,
        Relay(f"nats://127.0.0.1:{port}").running() as link,
    ):
        await near.declare(PLAN)
        site = folder / "site"
        async with leaf_server(keys, PLAN, role, site, int(link.url.rpartition(":")[2])) as url:
            access = build_access(role, str(site), RUN)
            async with connect(url, run=RUN, role=role, worker=f"{role}-1", **access) as far:
                yield Place(near, far, link)


async def test_a_reader_gets_the_last_entry_though_it_was_lost_on_the_way(tmp_path: Path) -> None:
    async with place(tmp_path, "learner") as made, made.far.read([S.life("init", "a")]) as reader:
        for word in (b"first", b"second"):
            await made.near.publish(S.life("init", "a"), word)
            assert (await reader.receive()).payload == word
        for number in range(3):
            async with made.losing():
                await made.near.publish(S.life("init", "a"), b"lost %d" % number)
            with anyio.fail_after(20):
                assert (await reader.receive()).payload == b"lost %d" % number


async def test_work_and_credits_that_were_lost_on_the_way_come_back(tmp_path: Path) -> None:
    async with place(tmp_path, "environment") as made:
        async with made.far.pull(tasks_consumer("default"), credits=CREDITS) as pulling:
            await made.near.publish(S.task("default", "e0"), b"first")
            delivery = await pulling.receive()
            await delivery.ack()
            pulling.grant()
            async with made.losing():
                for number in range(1, CREDITS):
                    await made.near.publish(S.task("default", f"e{number}"), b"lost")
            await made.near.publish(S.task("default", f"e{CREDITS}"), b"last")
            with anyio.fail_after(45):
                held = {(await pulling.receive()).message.subject for _ in range(CREDITS)}
            assert held == {S.task("default", f"e{number}") for number in range(1, CREDITS + 1)}


async def test_credits_come_back_though_other_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull request that the server forgot is not found by silence where later ones are answered."""
    monkeypatch.setattr(pull_requests, "RENEW_SECONDS", 3.0)
    async with place(tmp_path, "environment") as made:
        async with made.far.pull(tasks_consumer("default"), credits=CREDITS) as pulling:
            for number in range(BUSY):
                await made.near.publish(S.task("default", f"e{number}"), b"before")
            held = [await pulling.receive() for _ in range(BUSY)]
            async with made.losing():
                pass
            await anyio.sleep(RELINKED_SECONDS)  # asked before that, it would be told
            for number in range(24):
                await made.near.publish(S.task("default", f"f{number}"), b"steady")
                await held.pop(0).ack()
                pulling.grant()
                with anyio.fail_after(10):
                    held.append(await pulling.receive())
                await anyio.sleep(0.5)
            for number in range(CREDITS - BUSY):
                await made.near.publish(S.task("default", f"g{number}"), b"last")
            with anyio.fail_after(5):
                for _ in range(CREDITS - BUSY):
                    await pulling.receive()


async def test_a_publish_whose_ack_was_lost_on_the_way_is_stored_once(tmp_path: Path) -> None:
    async with place(tmp_path, "environment") as made:
        for number in range(3):
            async with anyio.create_task_group() as tasks, made.losing():

                async def publish(number: int = number) -> None:
                    with anyio.fail_after(20):
                        ack = await made.far.publish(S.life("environment", "e"), b"%d" % number, timeout=15)
                    assert ack.sequence == number + 1

                tasks.start_soon(publish)
                while (await made.near.log_state()).last_sequence <= number:  # noqa: ASYNC110  # the server's
                    await anyio.sleep(0.05)
        assert [entry.payload async for entry in made.near.scan([S.life("environment", "e")])] == [b"0", b"1", b"2"]
