"""A server that comes back without what it had, or cannot hold what it will be given: who connects or follows is told."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.nats import connection, log_identity, reader
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.streams import plan_run
from fleetbus.errors import BusError, PublishUnanswered, UserError
from fleetbus_schemas import Subjects
from tests.support.servers import connect, needs_only_copy, run_server

RUN = "r"
SUBJECTS = Subjects(RUN)


@pytest.mark.integration
@needs_only_copy
@pytest.mark.parametrize("stored", [3, 25])
async def test_who_reads_a_log_that_was_emptied_and_made_anew_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    monkeypatch.setattr(reader, "_RETRY_SECONDS", 0.05)
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server:
            monkeypatch.setattr(connection, "_RECONNECT_WAIT_SECONDS", (2.0, 2.0))
            async with connect(server.url, run=RUN) as slow:
                await slow.declare(plan_run(RUN, lanes=1))
                for number in range(20):
                    await slow.publish(SUBJECTS.episode(f"old{number}"), b"x")
                async with slow.read([SUBJECTS.episodes]) as entries:
                    for _ in range(20):
                        await entries.receive()
                    await server.kill()
                    shutil.rmtree(tmp_path / "jetstream")
                    await server.restart()
                    async with connect(server.url, run=RUN) as quick:
                        await quick.declare(plan_run(RUN, lanes=1))
                        for number in range(stored):
                            await quick.publish(SUBJECTS.episode(f"new{number}"), b"x")
                    with pytest.raises(BusError, match=f"stream fb_{RUN} was created again"):
                        await entries.receive()


@pytest.mark.integration
@needs_only_copy
@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ([], "ends at 12, and 20 was read before"),
        (["episode"] * 9, "entry 20 of stream fb_r is not the one that was read before"),
        (["episode"] * 7 + ["life"] * 3, "entry 20 of stream fb_r is not the one that was read before"),
    ],
    ids=["shorter", "longer again", "longer again, and another subject at the position"],
)
async def test_who_reads_a_log_whose_tail_was_lost_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: list[str], told: str
) -> None:
    """What is stored at lost positions would be passed over: a learner would wait for results that are in the log."""
    monkeypatch.setattr(reader, "_RETRY_SECONDS", 0.05)
    store, copy = tmp_path / "store", tmp_path / "copy"
    with anyio.fail_after(50):
        async with run_server(store) as server:
            monkeypatch.setattr(connection, "_RECONNECT_WAIT_SECONDS", (2.0, 2.0))
            async with connect(server.url, run=RUN) as slow:
                await slow.declare(plan_run(RUN, lanes=1))
                async with slow.read([SUBJECTS.episodes]) as entries:
                    for number in range(20):
                        await slow.publish(SUBJECTS.episode(f"old{number}"), b"x")
                        await entries.receive()
                        if number == 11:
                            await copy_store(server.pid, store, copy)
                    await lose(server, store, copy)
                    await server.restart()
                    async with connect(server.url, run=RUN) as quick:
                        for number, kind in enumerate(stored):
                            name = (
                                SUBJECTS.episode(f"n{number}") if kind == "episode" else SUBJECTS.life("learner", f"n{number}")
                            )
                            await quick.publish(name, b"x")
                    with pytest.raises(BusError, match=told):
                        await entries.receive()


@needs_only_copy
@pytest.mark.parametrize("when", ["at once", "when it stores the next one"])
async def test_who_stored_what_was_lost_is_told_although_nothing_is_lost_that_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A learner's version, say, which nobody would publish again."""
    monkeypatch.setattr(reader, "_RETRY_SECONDS", 0.05)
    store, copy = tmp_path / "store", tmp_path / "copy"
    with anyio.fail_after(50):
        async with run_server(store) as server, connect(server.url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            async with bus.read([SUBJECTS.episodes]) as entries:
                await bus.publish(SUBJECTS.episode("kept"), b"x")
                await entries.receive()
                await copy_store(server.pid, store, copy)
                for number in range(20):
                    await bus.publish(SUBJECTS.life("learner", f"n{number}"), b"x")
                await lose(server, store, copy)
                if when == "when it stores the next one":
                    monkeypatch.setattr(log_identity.LogIdentity, "check", always_the_same)
                await server.restart()
                if when == "when it stores the next one":
                    await bus.publish(SUBJECTS.life("learner", "next"), b"x")
                told = (
                    "position was given to another" if when == "when it stores the next one" else "ends at 1, and 21 was stored"
                )
                with pytest.raises(BusError, match=told):
                    await entries.receive()


@needs_only_copy
async def test_who_has_stored_beyond_its_lost_entry_before_it_looks_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation: others fill the lost positions while the reader waits for the log to be long enough again."""
    may_look, check = anyio.Event(), log_identity.LogIdentity.check

    async def check_later(*arguments: Any) -> bool:
        await may_look.wait()
        return await check(*arguments)

    store, copy = tmp_path / "store", tmp_path / "copy"
    with anyio.fail_after(50):
        async with run_server(store) as server, connect(server.url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            async with bus.read([SUBJECTS.episodes]) as entries:
                await bus.publish(SUBJECTS.episode("kept"), b"x")
                await entries.receive()
                await copy_store(server.pid, store, copy)
                await bus.publish(SUBJECTS.policy("default"), b"version 1")
                await lose(server, store, copy)
                monkeypatch.setattr(log_identity.LogIdentity, "check", check_later)
                await server.restart()
                async with connect(server.url, run=RUN) as other:
                    await other.publish(SUBJECTS.life("learner", "other"), b"x")
                assert (await bus.publish(SUBJECTS.life("learner", "own"), b"x")).sequence == 3
                may_look.set()
                with pytest.raises(BusError, match="entry 2 of stream fb_r is not the one that was stored there"):
                    await entries.receive()


async def always_the_same(*_: Any) -> bool:
    return True


async def copy_store(pid: int, store: Path, copy: Path) -> None:
    """What a loss of power would leave now."""
    os.kill(pid, signal.SIGSTOP)
    await anyio.to_thread.run_sync(shutil.copytree, store, copy)
    os.kill(pid, signal.SIGCONT)


async def lose(server: Any, store: Path, copy: Path) -> None:
    """End the server, and leave of its store what was there when it was copied."""
    await server.kill()
    shutil.rmtree(store)
    copy.rename(store)  # noqa: ASYNC240


async def test_who_reads_a_log_that_was_trimmed_behind_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry that it read last is gone, and nothing was lost."""
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server, connect(server.url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            await bus.publish(SUBJECTS.life("learner", "l"), b"x")
            async with bus.read([SUBJECTS.episodes]) as entries:
                await bus.publish(SUBJECTS.episode("e0"), b"x")
                assert (await entries.receive()).sequence == 2
                await bus.publish(SUBJECTS.life("learner", "m"), b"x")
                await bus.purge(SUBJECTS.episodes, below=3)
                await server.kill()
                await server.restart()
                await bus.publish(SUBJECTS.episode("e1"), b"x")
                assert (await entries.receive()).sequence == 4


async def test_who_reads_a_log_that_is_only_away_goes_on_where_it_was(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server, connect(server.url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            async with bus.read([SUBJECTS.episodes]) as entries:
                for number in range(20):
                    await bus.publish(SUBJECTS.episode(f"e{number}"), b"x")
                for _ in range(20):
                    await entries.receive()
                for number in range(3):
                    await server.kill()
                    await server.restart()
                    await bus.publish(SUBJECTS.episode(f"later{number}"), b"x")
                    assert (await entries.receive()).sequence == 21 + number


@pytest.mark.integration
async def test_a_stream_without_a_leader_for_a_while_is_waited_for_by_who_has_published_there(tmp_path: Path) -> None:
    """As in a cluster whose leader was killed: until another is elected nobody listens on the stream's subjects."""
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server, connect(server.url, run=RUN) as bus, connect(server.url, run=RUN) as other:
            assert isinstance(bus, NatsBus)
            await bus.declare(plan_run(RUN, lanes=1))
            await bus.publish(SUBJECTS.episode("e"), b"x")
            await bus._connection.api.ask(f"STREAM.DELETE.fb_{RUN}")
            async with anyio.create_task_group() as group:
                group.start_soon(bus.publish, SUBJECTS.episode("waits"), b"x")
                with pytest.raises(BusError, match="no stream stores"):
                    await other.publish(SUBJECTS.episode("never"), b"x")
                with pytest.raises(PublishUnanswered):
                    await bus.publish(SUBJECTS.episode("impatient"), b"x", timeout=0.6)
                await other.declare(plan_run(RUN, lanes=1))
            assert await bus.last(SUBJECTS.episode("waits")) is not None


async def test_a_server_that_takes_short_messages_only_is_refused_in_one_line(tmp_path: Path) -> None:
    """Otherwise the long episodes, and those alone, would end as lost."""
    (tmp_path / "short.conf").write_text("max_payload: 65536\n")
    with anyio.fail_after(50):
        async with run_server(tmp_path / "store", config=tmp_path / "short.conf") as server:
            with pytest.raises(UserError, match=r"takes 65536 bytes.*raise its max_payload"):
                async with connect(server.url, run=RUN):
                    pass
