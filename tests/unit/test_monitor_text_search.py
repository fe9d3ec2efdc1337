"""The page's search while the index is being made, while the log does not answer, and after its file was deleted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import Action, Subjects, encode
from fleetbus_workers.observe.monitor.text_search import TextSearch

SUBJECTS = Subjects("r")


@asynccontextmanager
async def filled_bus(episodes: int) -> AsyncIterator[Bus]:
    server = MemoryServer()
    async with server.connect("r", worker="w") as bus:
        await bus.declare(plan_run("r", lanes=1))
        for number in range(episodes):
            action = Action(episode_id=f"e{number}", attempt=1, turn=0, text=f"word{number} common")
            await bus.publish(SUBJECTS.action("e0", f"e{number}"), encode(action))
        yield bus


class SlowBus:
    """The log of a bus, from which the entries after the second come when ``may_go_on`` is set; or that answers ``failure``."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.may_go_on = anyio.Event()
        self.failure: Exception | None = None

    async def log_state(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return await self.bus.log_state()

    async def scan(self, subjects: list[str], *, start: int = 1) -> AsyncGenerator[StreamEntry]:
        async for entry in self.bus.scan(subjects, start=start):
            if entry.sequence > 2:
                await self.may_go_on.wait()
            yield entry


async def test_a_search_is_answered_from_what_is_indexed_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus.recording.text_indexing.BATCH_ENTRIES", 2)
    monkeypatch.setattr("fleetbus_workers.observe.monitor.text_search.FRESH_SECONDS", 0.5)
    async with filled_bus(4) as bus, anyio.create_task_group() as tasks:
        slow = SlowBus(bus)
        search = TextSearch(slow, SUBJECTS, tmp_path / "text.sqlite")  # type: ignore[arg-type]
        tasks.start_soon(search.follow)
        assert not (tmp_path / "text.sqlite").exists(), "nothing is made before somebody searches"
        assert await search.find_episodes("common") == {"e0", "e1"}
        assert await search.compute_share(4) == 0.5
        slow.may_go_on.set()
        with anyio.fail_after(10):
            while len(await search.find_episodes("common")) < 4:
                pass
        assert await search.compute_share(4) == 1
        monkeypatch.setattr("fleetbus_workers.observe.monitor.text_search.FRESH_SECONDS", 10)
        (tmp_path / "text.sqlite").unlink()
        assert len(await search.find_episodes("common")) == 4, "a file that was deleted is made again"
        assert [*await search.describe("word3", ["e3", "e2"])] == ["e3"]
        with pytest.raises(UserError):
            await search.find_episodes("--")
        tasks.cancel_scope.cancel()


async def test_a_log_that_does_not_answer_is_said_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.observe.monitor.text_search.RETRY_SECONDS", 0.01)
    async with filled_bus(1) as bus, anyio.create_task_group() as tasks:
        slow = SlowBus(bus)
        slow.failure = BusError("no answer")
        search = TextSearch(slow, SUBJECTS, tmp_path / "text.sqlite")  # type: ignore[arg-type]
        tasks.start_soon(search.follow)
        assert await search.find_episodes("common") == set() and search.problem == "no answer"
        slow.failure = None
        with anyio.fail_after(10):
            while await search.find_episodes("common") != {"e0"}:
                pass
        assert search.problem == ""
        tasks.cancel_scope.cancel()
