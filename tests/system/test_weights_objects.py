"""The object store of a real server: whole objects or nothing, in the format of NATS's own client."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.bus.base import PublishAck
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.objects import CHUNK_BYTES
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.objects import ObjectMissing
from fleetbus.errors import PublishUnanswered


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[NatsServerProcess]:
    portal: BlockingPortal
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(run_server(tmp_path_factory.mktemp("nats"))) as server,
    ):
        yield server


@pytest.fixture
async def bus(server: NatsServerProcess) -> AsyncGenerator[NatsBus]:
    async with connect(server.url, run="objects") as bus:
        assert isinstance(bus, NatsBus)
        yield bus


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 9 << 20])
async def test_what_was_put_is_got_whatever_its_size(bus: NatsBus, tmp_path: Path, size: int) -> None:
    store = bus.objects("weights")
    (tmp_path / "in").write_bytes(os.urandom(size))

    await store.put(f"size{size}", tmp_path / "in")
    await store.get(f"size{size}", tmp_path / "out")

    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


async def test_the_format_is_that_of_natss_own_client(bus: NatsBus, server: NatsServerProcess, tmp_path: Path) -> None:
    nats = pytest.importorskip("nats")
    (tmp_path / "ours").write_bytes(os.urandom(CHUNK_BYTES + 7))
    await bus.objects("shared").put("ours", tmp_path / "ours")
    client = await nats.connect(server.url)
    try:
        bucket = await client.jetstream().object_store("shared")
        assert (await bucket.get("ours")).data == (tmp_path / "ours").read_bytes()
        theirs = os.urandom(300_000)
        await bucket.put("theirs", theirs)
    finally:
        await client.close()

    await bus.objects("shared").get("theirs", tmp_path / "theirs")

    assert (tmp_path / "theirs").read_bytes() == theirs


async def test_what_is_not_there_or_removed_is_missing_and_leaves_no_file(bus: NatsBus, tmp_path: Path) -> None:
    store = bus.objects("removing")
    (tmp_path / "in").write_bytes(b"x" * 1000)
    await store.put("once", tmp_path / "in")
    with pytest.raises(ObjectMissing, match="never is not in bucket removing"):
        await store.get("never", tmp_path / "out")
    await store.remove("once")
    await store.remove("once")

    with pytest.raises(ObjectMissing):
        await store.get("once", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


async def test_an_object_with_a_lost_chunk_is_missing(bus: NatsBus, tmp_path: Path) -> None:
    store = bus.objects("torn")
    (tmp_path / "in").write_bytes(os.urandom(3 * CHUNK_BYTES))
    await store.put("torn", tmp_path / "in")
    await bus._connection.api.ask("STREAM.MSG.DELETE.OBJ_torn", {"seq": 2})

    with pytest.raises(ObjectMissing, match="torn"):
        await store.get("torn", tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_cancelled_put_makes_nothing_visible(bus: NatsBus, tmp_path: Path) -> None:
    store = bus.objects("cancelled")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 128 << 20)
    (tmp_path / "in").write_bytes(os.urandom(3 * CHUNK_BYTES))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.put, "half", tmp_path / "large")
            with anyio.fail_after(50):
                while not (await _messages(bus)):  # noqa: ASYNC110  # the server tells nobody
                    await anyio.sleep(0.01)
            scope.cancel()

    with pytest.raises(ObjectMissing):
        await store.get("half", tmp_path / "out")
    await store.put("half", tmp_path / "in")
    await store.get("half", tmp_path / "out")


async def test_an_object_whose_last_answer_was_lost_is_whole_for_who_finds_it(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image has the name of its content: others may have stored it, and name it in their messages."""
    content = os.urandom(CHUNK_BYTES + 1)
    await bus.objects("unanswered").put_bytes("image", content)
    publish = bus._publisher.publish

    async def lose_answer(subject: str, payload: bytes, **options: Any) -> PublishAck:
        ack = await publish(subject, payload, **options)
        if ".M." in subject:
            raise PublishUnanswered(f"{subject}: no ack")
        return ack

    monkeypatch.setattr(bus._publisher, "publish", lose_answer)
    with pytest.raises(PublishUnanswered):
        await bus.objects("unanswered").put_bytes("image", content)
    assert await bus.objects("unanswered").get_bytes("image", max_bytes=len(content)) == content


async def test_an_entry_that_is_stored_after_its_writer_gave_up_names_chunks_that_are_there(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose disk stalls answers reads meanwhile: what it says then of what is on its way is no answer."""
    content, late = os.urandom(CHUNK_BYTES + 1), []
    await bus.objects("late").put_bytes("image", content)
    publish = bus._publisher.publish

    async def stall(subject: str, payload: bytes, **options: Any) -> PublishAck:
        if payload and ".C." in subject:
            return await publish(subject, payload, **options)
        late.append((subject, payload, options))
        raise PublishUnanswered(f"{subject}: no ack")

    monkeypatch.setattr(bus._publisher, "publish", stall)
    with pytest.raises(PublishUnanswered):
        await bus.objects("late").put_bytes("image", content)
    for subject, payload, options in late:
        await publish(subject, payload, **options)
    assert await bus.objects("late").get_bytes("image", max_bytes=len(content)) == content


async def _messages(bus: NatsBus) -> int:
    from fleetbus.bus.nats.api import ApiRefused

    try:
        return int((await bus._connection.api.ask("STREAM.INFO.OBJ_cancelled"))["state"]["messages"])
    except ApiRefused:
        return 0
