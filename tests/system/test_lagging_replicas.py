"""Reads from a replica that lags: nobody is told less than it knows. The lag is made here, the server is a real one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fleetbus.bus.nats import bus as nats_bus
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.direct import get_histories, get_last
from fleetbus.bus.nats.publisher import REMEMBERED, Positions
from fleetbus.bus.streams import plan_run
from fleetbus.errors import SequenceConflict
from fleetbus_schemas import Subjects
from tests.support.servers import connect, run_server

SUBJECTS = Subjects("r")
EPISODE = SUBJECTS.episode("e")


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[NatsBus]:
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server, connect(server.url, run="r") as opened:
            await opened.declare(plan_run("r", lanes=1))
            assert isinstance(opened, NatsBus)
            yield opened


@pytest.fixture
def lag(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """So many further reads miss the newest entry, by what is read."""
    left = {"last": 0, "history": 0}

    async def last(*arguments: Any) -> Any:
        left["last"] -= 1
        return None if left["last"] >= 0 else await get_last(*arguments)

    async def histories(*arguments: Any) -> Any:
        left["history"] -= 1
        entries = await get_histories(*arguments)
        return entries[:-1] if left["history"] >= 0 else entries

    monkeypatch.setattr(nats_bus, "get_last", last)
    monkeypatch.setattr(nats_bus, "get_histories", histories)
    return left


async def test_what_was_acked_is_read_back(bus: NatsBus, lag: dict[str, int]) -> None:
    await bus.publish(EPISODE, b"claim")
    lag["last"] = lag["history"] = 3
    found = await bus.last(EPISODE)
    assert found is not None
    assert found.payload == b"claim"
    other = SUBJECTS.episode("nobody")
    assert [entry.payload for entry in await bus.history([other, EPISODE])] == [b"claim"]


async def test_what_a_write_was_refused_for_is_read_back(bus: NatsBus, lag: dict[str, int], tmp_path: Path) -> None:
    async with connect(bus._connection.wire.client.connected_url.geturl(), run="r") as other:
        await other.publish(EPISODE, b"the claim of another")
    with pytest.raises(SequenceConflict):
        await bus.publish(EPISODE, b"claim", expected_last=0)
    lag["last"] = 3
    found = await bus.last(EPISODE)
    assert found is not None
    assert found.payload == b"the claim of another"


async def test_what_was_purged_is_not_waited_for_without_end(
    bus: NatsBus, lag: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "LAG_PAUSES_SECONDS", (0.0, 0.0))
    await bus.publish(EPISODE, b"claim")
    await bus.purge(EPISODE, below=2)
    assert await bus.last(EPISODE) is None
    assert lag["last"] == -3
    assert await bus.history([EPISODE]) == []


async def test_what_this_connection_knows_nothing_of_is_read_once(bus: NatsBus, lag: dict[str, int]) -> None:
    assert await bus.last(EPISODE) is None
    assert lag["last"] == -1


async def test_a_scan_reads_beside_the_leader_of_the_log_where_nothing_is_missing(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places are made up: a server alone names none."""
    await bus.publish(EPISODE, b"claim")
    asked = bus._connection.api.ask
    places = iter(["n2", "n3", "n1", "n2"])
    created: list[str] = []

    async def ask(subject: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        answer = await asked(subject, *arguments, **options)
        if subject.startswith("STREAM.INFO"):
            answer["cluster"] = {"leader": "n1"}
        elif subject.startswith("CONSUMER.CREATE"):
            answer["cluster"] = {"leader": next(places)}
            created.append(subject.split(".")[3])
        return answer

    monkeypatch.setattr(bus._connection.api, "ask", ask)
    assert [entry.payload async for entry in bus.scan([EPISODE])] == [b"claim"]
    assert len(created) == 3
    with anyio.fail_after(30):  # those in other places are removed, and the last one with its reader
        while set(created) & set((await asked("CONSUMER.NAMES.fb_r"))["consumers"]):
            await anyio.lowlevel.checkpoint()


@pytest.mark.integration
async def test_the_first_publish_of_a_connection_waits_for_a_log_that_elects_its_leader(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = bus._connection.request_mux.ask
    unheard = iter(range(5))

    async def nobody(reply: str, command: bytes, **options: Any) -> Any:
        if command.startswith(b"HPUB") and next(unheard, None) is not None:
            return b"", b"NATS/1.0 503\r\n\r\n"
        return await ask(reply, command, **options)

    monkeypatch.setattr(bus._connection.request_mux, "ask", nobody)
    assert (await bus.publish(EPISODE, b"claim")).sequence == 1


def test_positions_are_bounded_and_the_longest_unused_is_forgotten() -> None:
    positions = Positions()
    positions.note("kept", 1)
    for number in range(REMEMBERED):
        positions.note("kept", number)
        positions.note(f"s{number}", number)
    assert positions.is_behind(["kept"], [])
    assert not positions.is_behind(["s0"], [])
    assert positions.is_behind([f"s{REMEMBERED - 1}"], [])
