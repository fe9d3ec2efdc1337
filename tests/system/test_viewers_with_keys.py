"""`top`, `metrics` and `monitor` with a monitor's key: the server logs no violation, and its restarts end none of them,
and a withdrawn key ends each in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from fleetbus.auth.rotation import revoke_key
from fleetbus.errors import BusError
from fleetbus_schemas import EpisodeRequested, Subjects, Task, encode
from tests.support.ports import free_ports
from tests.support.servers import RunningServers, declared_servers

pytestmark = pytest.mark.timeout(120)

RUN = "watched"
S = Subjects(RUN)
LOOKS = 25
"""Messages of a viewer to the server: some looks."""

RESTARTS = 4


@asynccontextmanager
async def viewing(servers: RunningServers, command: str, *options: str) -> AsyncIterator[anyio.abc.Process]:
    """A viewer as a user starts it, stopped by Ctrl-C."""
    assert servers.auth is not None
    arguments = [sys.executable, "-m", "fleetbus_workers.cli", command, RUN, "--nats", servers.url, "--nats-auth"]
    process = await anyio.open_process([*arguments, str(servers.auth.path), *options], stdout=subprocess.DEVNULL)
    try:
        yield process
        assert process.returncode is None, f"{command} has ended with {process.returncode}"
        process.send_signal(signal.SIGINT)
        assert await process.wait() in (0, 130)
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


async def count_messages(servers: RunningServers, command: str) -> int:
    """What a viewer has sent on its present connection, 0 without one."""

    def ask() -> list[dict[str, Any]]:
        url = f"{servers.processes[0].monitor_url}/connz"
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return list(msgspec.json.decode(answer.read())["connections"])
        return []

    connections = await anyio.to_thread.run_sync(ask)
    return sum(each["in_msgs"] for each in connections if f" {command} " in each.get("name", ""))


async def until_it_looked(servers: RunningServers, command: str, looks: int = LOOKS) -> None:
    while await count_messages(servers, command) < looks:  # noqa: ASYNC110  # another process's connection
        await anyio.sleep(0.1)


async def request_episodes(servers: RunningServers, stop: anyio.Event) -> None:
    """A run that goes on, so that readers have something to read at every moment."""
    number = 0
    async with servers.connect(RUN, "learner-0") as bus:
        while not stop.is_set():
            number += 1
            request = EpisodeRequested(
                episode_id=f"e{number}", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default",
                deadline_ns=1,
            )  # fmt: skip
            with suppress(BusError):
                await bus.publish(S.task("default", f"e{number}"), encode(request), timeout=20)


@pytest.mark.integration
@pytest.mark.parametrize("command", ["top", "metrics", "monitor"])
async def test_a_viewer_asks_for_nothing_that_its_key_may_not(command: str, tmp_path: Path) -> None:
    options = () if command == "top" else ("--port", str(free_ports(1)[0]))
    with anyio.fail_after(100):
        async with declared_servers(tmp_path, RUN, form="keyed") as servers:
            async with viewing(servers, command, *(("--json",) if command == "top" else options)):
                await until_it_looked(servers, command)
            assert await servers.violations() == []


@pytest.mark.integration
async def test_viewers_outlive_restarts_of_the_server_while_the_log_grows(tmp_path: Path) -> None:
    ports = [str(port) for port in free_ports(2)]
    with anyio.fail_after(110):
        async with declared_servers(tmp_path, RUN, form="keyed") as servers, anyio.create_task_group() as tasks:
            stop = anyio.Event()
            tasks.start_soon(request_episodes, servers, stop)
            async with (
                viewing(servers, "top", "--json"),
                viewing(servers, "metrics", "--port", ports[0]),
                viewing(servers, "monitor", "--port", ports[1]),
            ):
                for _ in range(RESTARTS):
                    for command in ("top", "metrics", "monitor"):
                        await until_it_looked(servers, command, 5)
                    await servers.processes[0].kill()
                    await servers.processes[0].restart()
                for command in ("top", "metrics", "monitor"):
                    await until_it_looked(servers, command, 5)
                stop.set()
            assert await servers.violations() == []


@pytest.mark.integration
@pytest.mark.parametrize("command", ["top", "metrics", "monitor"])
async def test_a_viewer_whose_key_was_withdrawn_says_so_in_one_line_and_exits_with_1(command: str, tmp_path: Path) -> None:
    with anyio.fail_after(100):
        async with declared_servers(tmp_path, RUN, form="keyed") as servers:
            assert servers.auth is not None
            arguments = [sys.executable, "-m", "fleetbus_workers.cli", command, RUN, "--nats", servers.url, "--nats-auth"]
            options = ["--json"] if command == "top" else ["--port", str(free_ports(1)[0])]
            said = tmp_path / "said"
            with said.open("wb") as errors:
                process = await anyio.open_process(
                    [*arguments, str(servers.auth.path), *options], stdout=subprocess.DEVNULL, stderr=errors
                )
            async with process:
                await until_it_looked(servers, command, 5)
                revoke_key(servers.auth, RUN, "monitor")
                os.kill(servers.processes[0].pid, signal.SIGHUP)
                assert await process.wait() == 1
    last = said.read_text().splitlines()[-1]
    assert last == "fleetbus: the connection is closed for good: the NATS server refuses the credentials"
    assert "Traceback" not in said.read_text()
