"""An archive in which nothing stands yet, or that lags behind the log, ends nobody's work."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_archive, audit_run
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.log.actions import read_actions
from fleetbus.log.archive_reader import find_archived_result, read_archive, read_archived_entries
from fleetbus.log.archive_writer import open_archive
from fleetbus_schemas import Action, ActionReference, EpisodeFinished, Subjects, encode
from tests.support.virtual_time import virtual_time

S = Subjects("run")

anyio_backend = virtual_time


async def run_inline(function: object, *arguments: object, **named: object) -> object:
    await anyio.lowlevel.checkpoint()
    return function(*arguments, **named)  # type: ignore[operator]


RUNTIME = Runtime(offload=run_inline)  # type: ignore[arg-type]


@pytest.fixture(params=["none", "lock"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A recorder's folder before it was started, and before its first segment."""
    folder: Path = tmp_path / "archive"
    if request.param == "lock":
        with open_archive(folder, "run"):
            pass
    return folder


def test_who_works_finds_nothing_in_an_archive_that_was_not_begun(archive: Path) -> None:
    assert read_archived_entries(archive, {1, 2}, run="run") == {}
    assert find_archived_result(archive, S, "e", start=1) is None


async def test_who_looks_finds_an_archive_without_entries_where_a_recorder_has_opened_it(tmp_path: Path) -> None:
    with open_archive(tmp_path, "run"):
        assert list(read_archive(tmp_path, run="run")) == []
        assert [finding.kind for finding in (await audit_archive(S, tmp_path)).findings] == ["nothing_read"]
        async with MemoryServer().connect("run") as bus:
            await bus.declare(plan_run("run", lanes=1))
            await bus.publish(S.life("learner", "l"), b"x")
            assert (await audit_run(bus, S, archive=tmp_path)).findings == ()


async def test_actions_that_an_archive_has_later_than_they_left_the_log_are_waited_for(archive: Path) -> None:
    async with MemoryServer().connect("run") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("run", lanes=1))
        action = Action(episode_id="e", attempt=1, turn=0, worker="i", text="x")
        await bus.publish(S.action("e0", "e"), encode(action))
        entries = [entry async for entry in bus.scan([S.log])]
        await bus.purge(S.actions(), below=2)

        async def archive_later() -> None:
            await anyio.sleep(20)
            with open_archive(archive, "run") as writer:
                writer.append(entries)

        tasks.start_soon(archive_later)
        references = (ActionReference(sequence=1, lane="e0", turn=0),)
        result = EpisodeFinished(episode_id="e", group_id="g", attempt=1, outcome="completed", worker="e", actions=references)
        assert await read_actions(bus, S, [result], archive=archive, runtime=RUNTIME) == {"e": [action]}
