"""The NATS server's own endpoints: who is connected under which name, who does not read, what waits. Without them one line."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.diagnosis import check_nats_http
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.jetstream import ServerView, fetch_server_view
from fleetbus_workers.observe.run.nats_http import HOW, NatsServer, parse_monitoring_address, read_nats_server
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.top.view import SLOW_BYTES, build_facts, screen
from tests.support.http_server import serve_application
from tests.support.processes import until

RUN = "r"


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServerProcess]:
    folder = tmp_path_factory.mktemp("nats")
    config = folder / "nats.conf"
    config.write_text('write_deadline: "4s"\n')
    async with run_server(folder / "store", config=config) as running:
        yield running


@pytest.fixture(scope="module")
async def bus(server: NatsServerProcess) -> AsyncIterator[Bus]:
    async with connect(server.url, run=RUN, role="environment", worker="env-1") as connected:
        await connected.declare(plan_run(RUN, lanes=2))
        await connected.publish(Subjects(RUN).task("default", "e1"), b"a request")
        yield connected


async def fetch_view(server: NatsServerProcess, *, consumers: bool = False) -> NatsServer:
    return await to_thread.run_sync(partial(read_nats_server, str(server.monitor_url), RUN, consumers=consumers))


async def test_connections_are_named_by_worker_and_streams_by_size(server: NatsServerProcess, bus: Bus) -> None:
    async with connect(server.url, run="another", role="learner", worker="l"):
        seen = await fetch_view(server, consumers=True)
    assert [(client.worker, client.role, client.pending_bytes) for client in seen.clients] == [("env-1", "environment", 0)]
    assert seen.connections == 2 and seen.slow_consumers == 0 and seen.version.startswith("2.") and not seen.problem
    (log,) = [stream for stream in seen.streams if stream.name == "fb_r"]
    assert log.entries == 1 and log.bytes > 0
    assert {each["name"]: each["num_pending"] for each in seen.consumers}["task_default"] == 1


async def test_both_ways_of_asking_tell_the_same_of_consumers(
    server: NatsServerProcess, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await fetch_server_view(bus, RUN, server.monitor_url)

    async def refuse(*_: object, **__: object) -> dict[str, Any]:
        return {}

    monkeypatch.setattr("fleetbus_workers.observe.run.jetstream._request_api", refuse)
    over_http = await fetch_server_view(bus, RUN, server.monitor_url)
    assert asked.consumers == over_http.consumers and asked.pending == 1
    assert over_http.entries is None and over_http.clients == asked.clients


@pytest.mark.integration
async def test_a_client_that_does_not_read_is_named_with_its_unread_bytes_and_when_it_is_cut_off(
    server: NatsServerProcess, bus: Bus
) -> None:
    host, _, port = server.url.removeprefix("nats://").partition(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(b'CONNECT {"verbose":false,"name":"fleetbus r inference inf-slow"}\r\nSUB flood 1\r\nPING\r\n')
        await until(
            lambda: any(client.worker == "inf-slow" for client in read_nats_server(str(server.monitor_url), RUN).clients)
        )
        for _ in range(40):
            await bus.broadcast("flood", b"x" * 500_000)
        await until(lambda: read_nats_server(str(server.monitor_url), RUN).clients[0].pending_bytes > SLOW_BYTES)
        view = await fetch_server_view(bus, RUN, server.monitor_url)
        assert view.clients[0].worker == "inf-slow"
        assert "inf-slow has" in render(view) and "unread" in render(view)
        samples = collect(RunView(RunState(1), LogHealth(), view, [], now=0.0, now_ns=0))
        unread = {sample.labels: sample.value for sample in samples if sample.name == "fleetbus_nats_pending_bytes"}
        assert unread["inf-slow",] == view.clients[0].pending_bytes and unread["env-1",] == 0
        await until(lambda: bool(read_nats_server(str(server.monitor_url), RUN).slow_consumers))
    view = await fetch_server_view(bus, RUN, server.monitor_url)
    assert [cut.worker for cut in view.cut] == ["inf-slow"] and view.cut[0].reason.startswith("Slow Consumer")
    assert "inf-slow was disconnected at" in render(view)
    findings = {finding.name: finding for finding in await to_thread.run_sync(check_nats_http, server.monitor_url, RUN)}
    assert findings["nats monitoring"].state == "ok" and "1 pending" in findings["nats monitoring"].detail
    assert findings["slow consumers"].state == "warning" and "inf-slow (Slow Consumer" in findings["slow consumers"].detail


def render(view: ServerView) -> str:
    import io

    from rich.console import Console

    console = Console(width=80, file=io.StringIO())
    console.print(screen(build_facts(RunView(RunState(1), LogHealth(), view, [], now=0.0, now_ns=0), run=RUN)))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    return " ".join(text.split())


async def test_without_an_address_one_line_says_how_to_turn_it_on(bus: Bus) -> None:
    view = await fetch_server_view(bus, RUN, "")
    assert view.hint == HOW and len(HOW) <= 80 and HOW in render(view) and view.pending == 1
    assert (await fetch_server_view(bus, RUN, None)).hint == "", "a run that nobody serves has no server to turn it on at"
    (finding,) = check_nats_http("", RUN)
    assert (finding.state, finding.detail) == ("ok", HOW)


async def test_an_address_where_nobody_answers_is_one_line_and_no_error(bus: Bus) -> None:
    view = await fetch_server_view(bus, RUN, "http://127.0.0.1:1")
    assert view.hint == "no server monitoring at http://127.0.0.1:1: Connection refused" and view.pending == 1
    (finding,) = check_nats_http("http://127.0.0.1:1", RUN)
    assert finding.state == "warning"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"<html>", "the endpoint is not a nats-server"),
        (b"[1]", "not a nats-server"),
        (b'{"connections": 7}', "does not answer"),
    ],
)
async def test_what_is_no_nats_server_is_one_line(body: bytes, problem: str) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

    async with serve_application(lambda: answer) as web:
        seen = await to_thread.run_sync(read_nats_server, web.url, RUN)
        assert problem in seen.problem
        missing = await to_thread.run_sync(read_nats_server, f"{web.url}/x", RUN)
        assert missing.problem


@pytest.mark.parametrize("url", ["127.0.0.1:8222", "nats://127.0.0.1:4222", "http://", "http://host:port"])
def test_what_is_no_address_is_bad_input(url: str, capsys: Any) -> None:
    with pytest.raises(UserError, match="not an HTTP address"):
        parse_monitoring_address(url)
    assert run_program(["top", "r", "--nats-http", url]) == 2
    assert "--nats-http" in capsys.readouterr().err


@pytest.mark.integration
async def test_doctor_reads_it_and_says_how_where_it_cannot(server: NatsServerProcess, bus: Bus, capsys: Any) -> None:
    arguments = ["doctor", "--json", "--run", RUN, "--nats", server.url]
    for more, detail in (["--nats-http", str(server.monitor_url)], f"of run {RUN}"), ([], HOW):
        assert await to_thread.run_sync(run_program, [*arguments, *more]) == 0
        findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
        assert detail in findings["nats monitoring"]["detail"]


async def test_a_server_of_up_is_found_without_being_told(tmp_path: Path, server: NatsServerProcess) -> None:
    from fleetbus.config.load import load_configuration
    from fleetbus.config.run_folder import run_folder
    from fleetbus_workers.run_access.sources import resolve_nats_http

    here = load_configuration(flags={"run.folder": str(tmp_path), "run.name": RUN}).configuration
    assert resolve_nats_http(here, "") is None
    file = run_folder(here.run).server
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"url": server.url, "pid": 1, "monitor": server.monitor_url}))
    assert resolve_nats_http(here, "") == server.monitor_url
    assert resolve_nats_http(here, "http://elsewhere:8222/") == "http://elsewhere:8222"
    there = load_configuration(flags={"nats.url": server.url}).configuration
    assert resolve_nats_http(there, "") == ""
