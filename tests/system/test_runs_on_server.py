"""Runs on a server of one's own: as many as fit, listed, removed unless they run, and a hint where there is no room."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.declare import SMALLEST_LOG
from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_schemas import Heartbeat, Subjects, encode
from fleetbus_workers.cli.program import run_program
from tests.support.servers import connect, run_server, running_servers

pytestmark = pytest.mark.integration

STORAGE = 9 * SMALLEST_LOG + (1 << 20)

Said = Callable[..., str]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServerProcess]:
    """A server with little storage."""
    config = tmp_path / "nats.conf"
    config.write_text(f"jetstream {{ max_file_store: {STORAGE} }}\n")
    async with run_server(tmp_path / "store", monitor_port=None, config=config) as running:
        yield running


async def declare(server: NatsServerProcess, run: str, *, max_bytes: int = 4 * SMALLEST_LOG) -> int:
    """What the log of a new run may grow to."""
    async with connect(server.url, run=run) as bus:
        await bus.declare(plan_run(run, lanes=1, max_bytes=max_bytes))
        await bus.declare(plan_run(run, lanes=1, max_bytes=max_bytes))  # as every later `up` does
        return (await bus.log_state()).limit_bytes


async def test_runs_get_what_is_left_and_the_one_that_gets_nothing_is_told_what_to_do(server: NatsServerProcess) -> None:
    reserved = [await declare(server, f"r{number}") // SMALLEST_LOG for number in range(3)]
    assert reserved == [4, 4, 1], "the third has half of half"
    with pytest.raises(UserError, match="fleetbus runs rm RUN --nats URL") as refused:
        await declare(server, "r3")
    assert "10047" in str(refused.value)
    async with connect(server.url, run="r0") as bus:
        assert isinstance(bus, NatsBus)
        await bus.remove_run("r0")
        await bus.remove_run("r0")
    assert await declare(server, "r3") == 4 * SMALLEST_LOG


async def test_runs_are_listed_and_removed_unless_they_run(
    server: NatsServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("over", "going-on"):
        await declare(server, run, max_bytes=SMALLEST_LOG)
    async with connect(server.url, run="over") as bus:
        await bus.publish(Subjects("over").train("default"), b"entry")

    async def said(*arguments: str, code: int = 0) -> str:
        status = await anyio.to_thread.run_sync(run_program, ("runs", *arguments, "--nats", server.url))
        shown = capsys.readouterr()
        assert status == code, shown
        return shown.out or shown.err

    async with connect(server.url, run="going-on") as bus, anyio.create_task_group() as group:

        async def beat() -> None:
            while True:
                heartbeat = Heartbeat(role="learner", worker="l1")
                await bus.broadcast(Subjects("going-on").heartbeat("learner", "l1"), encode(heartbeat))
                await anyio.sleep(0.2)

        group.start_soon(beat)
        rows = {row["run"]: row for row in json.loads(await said("list", "--json"))}
        assert {run: row["running"] for run, row in rows.items()} == {"over": False, "going-on": True}
        assert (rows["over"]["entries"], rows["over"]["reserved_bytes"]) == (1, SMALLEST_LOG)
        assert rows["over"]["changed"]
        assert "over" in await said("list")
        assert "is running" in await said("rm", "over", "going-on", "--yes", code=2)
        assert "no run nobody" in await said("rm", "over", "nobody", "--yes", code=2)
        assert "removed over" in await said("rm", "over", "--yes")
        assert [row["run"] for row in json.loads(await said("list", "--json"))] == ["going-on"]
        group.cancel_scope.cancel()


async def test_the_hint_is_one_line_of_the_command_and_no_traceback(
    server: NatsServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    await declare(server, "full", max_bytes=STORAGE - 1)
    status = await anyio.to_thread.run_sync(run_program, ("init", "--nats-url", server.url, "--run-name", "next"))
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1), said
    assert "no storage left" in said


async def test_with_keys_runs_of_every_account_are_listed_and_removed_with_what_their_workers_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [plan_run(run, lanes=1, max_bytes=SMALLEST_LOG) for run in ("over", "going-on")]
    left = tmp_path / "runs" / "over"
    (left / "checkpoints" / "l1-000001").mkdir(parents=True)
    (left / "weights").mkdir()

    async with running_servers(tmp_path, plans, form="keyed") as servers:
        assert servers.auth is not None
        for plan in plans:
            await servers.declare(plan)
        options = ("--nats", servers.url, "--nats-auth", str(servers.auth.path), "--run-folder", str(tmp_path / "runs"))

        async def said(*arguments: str, code: int = 0) -> str:
            status = await anyio.to_thread.run_sync(run_program, ("runs", *arguments, *options))
            shown = capsys.readouterr()
            assert status == code, shown
            return shown.out or shown.err

        async with servers.connect("going-on", "learner-1") as bus, anyio.create_task_group() as group:

            async def beat() -> None:
                while True:
                    subject = Subjects("going-on").heartbeat("learner", "learner-1")
                    await bus.broadcast(subject, encode(Heartbeat(role="learner", worker="learner-1")))
                    await anyio.sleep(0.2)

            group.start_soon(beat)
            rows = {row["run"]: row["running"] for row in json.loads(await said("list", "--json"))}
            assert rows == {"over": False, "going-on": True}
            assert "is running" in await said("rm", "over", "going-on", "--yes", code=2)
            assert "admin's key of nobody" in await said("rm", "nobody", "--yes", code=2)
            assert left.is_dir()
            assert f"removed over and {left}" in (await said("rm", "over", "--yes")).replace("\n", "")
            assert not left.exists()
            assert [row["run"] for row in json.loads(await said("list", "--json"))] == ["going-on"]
            group.cancel_scope.cancel()
        assert await servers.violations() == []


async def test_files_that_an_earlier_removal_left_are_removed_by_the_next(
    server: NatsServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / "runs" / "gone"
    (left / "weights").mkdir(parents=True)
    arguments = ("runs", "rm", "gone", "--yes", "--nats", server.url, "--run-folder", str(tmp_path / "runs"))
    for code in (0, 2):
        assert await anyio.to_thread.run_sync(run_program, arguments) == code, capsys.readouterr()
        assert not left.exists()
    assert "no run gone" in capsys.readouterr().err
