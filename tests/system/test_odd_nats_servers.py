"""NATS servers that are not what a run needs: one line that says what is wrong and what to do, exit code 2."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.declare import stream_config
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import MAX_CONSUMERS, plan_run
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.program import run_program

RUN = "odd"
PLAN = plan_run(RUN, lanes=1)


@asynccontextmanager
async def connected(store: Path, *, config: Path | None = None) -> AsyncIterator[tuple[str, NatsBus]]:
    with anyio.fail_after(50):
        async with run_server(store, config=config) as server, connect(server.url, run=RUN, role="test") as bus:
            assert isinstance(bus, NatsBus)
            yield server.url, bus


async def refusal_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert await anyio.to_thread.run_sync(run_program, arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


async def refusal_of_role(*arguments: str) -> str:
    """Roles take signals, so each is a process of its own."""
    ended = await anyio.run_process([sys.executable, "-m", "fleetbus", *arguments], check=False)
    (line,) = (line for line in ended.stderr.decode().splitlines() if " [info" not in line)
    assert ended.returncode == 2
    return line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("subjects", ["other.>"]),
        ("retention", "workqueue"),
        ("retention", "interest"),
        ("storage", "memory"),
        ("discard", "old"),
        ("max_msgs_per_subject", 5),
        ("allow_direct", False),
        ("max_age", 3600 * 10**9),
        ("max_msgs", 1000),
        ("max_msg_size", 1000),
        ("no_ack", True),
        ("allow_rollup_hdrs", True),
        ("persist_mode", "async"),
        ("sources", [{"name": "another"}]),
        ("subject_transform", {"src": f"fb.{RUN}.>", "dest": "elsewhere.>"}),
    ],
)
async def test_a_stream_that_would_lose_entries_is_taken_for_no_log(field: str, value: Any, tmp_path: Path) -> None:
    async with connected(tmp_path / "store") as (_, bus):
        stream = stream_config(PLAN.log) | {field: value}
        await bus._connection.api.ask(f"STREAM.CREATE.{PLAN.log.name}", stream)
        with pytest.raises(UserError, match=rf"fb_odd exists with {field} .*correct it there or in the settings"):
            await bus.declare(PLAN)
        with pytest.raises(UserError, match=rf"fb_odd exists with {field} "):
            await bus.check_log()


async def test_a_log_with_other_limits_and_storage_settings_is_one(tmp_path: Path) -> None:
    async with connected(tmp_path / "store") as (_, bus):
        limits = {"max_bytes": 1 << 20, "duplicate_window": 10**9, "metadata": {"team": "a"}, "deny_delete": True}
        limits |= {"compression": "s2", "allow_msg_ttl": True, "deny_purge": True}
        await bus._connection.api.ask(f"STREAM.CREATE.{PLAN.log.name}", stream_config(PLAN.log) | limits)
        await bus.check_log()


@pytest.mark.integration
async def test_commands_say_that_a_stream_of_that_name_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with connected(tmp_path / "store") as (url, bus):
        queue = stream_config(PLAN.log) | {"retention": "workqueue"}
        await bus._connection.api.ask(f"STREAM.CREATE.{PLAN.log.name}", queue)
        output = tmp_path / "run.fbrec"
        for command in (["init"], ["audit"], ["top", "--once"], ["record", "-o", str(output)]):
            assert "retention 'workqueue'" in await refusal_of(capsys, *command, "--run", RUN, "--nats", url), command
        assert not output.exists()
        assert "retention 'workqueue'" in await refusal_of_role(
            "recorder", "--run", RUN, "--nats", url, "--archive", str(tmp_path)
        )


async def test_a_log_that_forgets_is_still_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with connected(tmp_path / "store") as (url, bus):
        forgetful = stream_config(PLAN.log) | {"max_age": 3600 * 10**9}
        await bus._connection.api.ask(f"STREAM.CREATE.{PLAN.log.name}", forgetful)
        assert await anyio.to_thread.run_sync(run_program, ["audit", RUN, "--nats", url]) == 1
    assert "max_age 3600" in capsys.readouterr().out, "it is read, and the limit is a finding"


async def test_a_copy_of_a_log_is_read_and_not_worked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a leaf node keeps one of the log of its hub, for those who look on."""
    async with connected(tmp_path / "store") as (url, bus):
        ask = bus._connection.api.ask
        await ask("STREAM.CREATE.hub", stream_config(PLAN.log) | {"name": "hub"})
        await ask(f"STREAM.CREATE.{PLAN.log.name}", {"name": PLAN.log.name, "storage": "file", "mirror": {"name": "hub"}})
        assert await anyio.to_thread.run_sync(run_program, ["audit", RUN, "--nats", url]) == 1
        assert "an empty log proves nothing" in capsys.readouterr().out
        with pytest.raises(UserError, match="fb_odd exists with subjects None"):
            await bus.check_log()


async def test_a_stream_that_is_refused_keeps_its_limit(tmp_path: Path) -> None:
    async with connected(tmp_path / "store") as (_, bus):
        queue = stream_config(PLAN.log) | {"retention": "workqueue", "max_bytes": 1 << 20}
        await bus._connection.api.ask(f"STREAM.CREATE.{PLAN.log.name}", queue)
        with pytest.raises(UserError, match="retention 'workqueue'"):
            await bus.declare(PLAN)
        assert (await bus.log_state()).limit_bytes == 1 << 20


@pytest.mark.integration
async def test_a_worker_whose_lanes_are_away_is_not_refused(tmp_path: Path) -> None:
    """As while the servers of a cluster that keep them elect a leader: whoever started the worker starts it again."""
    async with connected(tmp_path / "store") as (url, bus):
        await bus.declare(PLAN)
        await bus._connection.api.ask(f"STREAM.DELETE.{PLAN.lanes.name}")
        for role in ("environment", "inference"):
            command = [sys.executable, "-m", "fleetbus", role, "--run", RUN, "--nats", url]
            ended = await anyio.run_process(command, check=False)
            assert ended.returncode == 1, (role, ended.stderr.decode())
            assert "no responders" in ended.stderr.decode()


async def test_an_environment_worker_says_that_a_run_was_declared_in_part(tmp_path: Path) -> None:
    async with connected(tmp_path / "store") as (url, bus):
        await bus._connection.api.ask(f"STREAM.CREATE.{PLAN.log.name}", stream_config(PLAN.log))
        line = await refusal_of_role("environment", "--run", RUN, "--nats", url)
        assert f"fleetbus init --run {RUN}" in line


@pytest.mark.integration
async def test_a_pool_and_a_policy_that_were_not_declared_are_named(tmp_path: Path) -> None:
    async with connected(tmp_path / "store") as (url, bus):
        await bus.declare(PLAN)
        reach = ("--run", RUN, "--nats", url)
        assert "without pool other" in await refusal_of_role("environment", *reach, "--run-pool", "other")
        assert "policy other" in await refusal_of_role("inference", *reach, "--run-policy", "other")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("{max_streams: 1}", "raise max_streams"),
        ("{max_consumers: 3}", "raise max_consumers"),
        ("{max_bytes_required: true}", "max_bytes_required"),
        ("{max_file: 1M}", "no storage left"),
        ("false", "enable JetStream for this account"),
    ],
)
async def test_limits_of_an_account_are_named(
    limits: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "accounts.conf"
    users = "users: [{user: a, password: b}]"
    config.write_text(f"accounts {{\n A: {{\n  {users}\n  jetstream: {limits}\n }}\n}}\nno_auth_user: a\n")
    with anyio.fail_after(50):
        async with run_server(tmp_path / "store", config=config) as server:
            assert said in await refusal_of(capsys, "init", "--run", RUN, "--nats", server.url)


@pytest.mark.integration
async def test_a_log_has_more_consumers_than_a_server_allows_by_default(tmp_path: Path) -> None:
    """512 lanes: 1,026 consumers, where the server's own limit is 1,000 a stream."""
    many = plan_run(RUN, lanes=512)
    async with connected(tmp_path / "store") as (_, bus):
        await bus.declare(many)
        info = await bus._connection.api.ask(f"STREAM.INFO.{many.log.name}")
        assert (info["state"]["consumer_count"], info["config"]["max_consumers"]) == (1026, MAX_CONSUMERS)
        async with bus.read([Subjects(RUN).log]) as entries:
            await bus.publish(Subjects(RUN).episode("e"), b"x")
            assert (await entries.receive()).sequence == 1


async def test_a_log_of_before_gets_the_limit_of_its_plan_and_keeps_a_larger_one(tmp_path: Path) -> None:
    async with connected(tmp_path / "store") as (_, bus):
        ask = bus._connection.api.ask
        for found, wanted in ((-1, MAX_CONSUMERS), (1000, MAX_CONSUMERS), (1 << 20, 1 << 20)):
            await ask(f"STREAM.CREATE.{PLAN.log.name}", stream_config(PLAN.log) | {"max_consumers": found})
            await bus.declare(PLAN)
            assert (await ask(f"STREAM.INFO.{PLAN.log.name}"))["config"]["max_consumers"] == wanted
            await ask(f"STREAM.DELETE.{PLAN.log.name}")


@pytest.mark.integration
async def test_a_learner_that_is_one_reader_too_many_says_so_in_one_line(tmp_path: Path) -> None:
    async with connected(tmp_path / "store") as (url, bus):
        full = msgspec.structs.replace(PLAN.log, max_consumers=len(PLAN.consumers))
        await bus.declare(msgspec.structs.replace(PLAN, log=full))
        folder = str(tmp_path / "runs")
        line = await refusal_of_role("learner", "--run", RUN, "--nats", url, "--run-folder", folder)
        assert "takes no more readers: raise max_consumers" in line


@contextmanager
def stranger(greeting: bytes) -> Iterator[str]:
    """A port that greets everybody with these bytes, and answers nothing."""
    clients: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                clients.append(client)
                with suppress(OSError):  # who leaves in mid-greeting may come again
                    client.sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield f"nats://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in clients:
                client.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"INFO [1, 2]\r\n",
        b'INFO {"version": 5, "max_payload": 1048576}\r\nPONG\r\n',
        b'INFO {"version": "2.12.0", "max_payload": "x"}\r\nPONG\r\n',
        b"A" * (1 << 20),
    ],
    ids=["no object", "odd version", "odd payload", "no end"],
)
async def test_what_greets_as_no_server_does_is_named(greeting: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with stranger(greeting) as url, anyio.fail_after(50):
        assert f"what answers at {url} is no NATS server" in await refusal_of(capsys, "init", "--nats", url)
