"""Servers of a platform: accounts that are JWTs, contexts of the nats command line, WebSocket behind TLS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from anyio.abc import SocketStream

from fleetbus.auth.access import Access, build_access
from fleetbus.auth.certificates import make_certificates
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import NotPermitted, UserError
from fleetbus_schemas import Subjects
from tests.support.jwt_accounts import Platform
from tests.support.ports import free_ports
from tests.system.test_auth_up import shown_by_ps

RUN = "foreign"
PLAN = plan_run(RUN, lanes=2, max_bytes=1 << 28)
SUBJECTS = Subjects(RUN)
CONTEXT = "prod.eu"


class Place(NamedTuple):
    """A server of a platform. ``seed`` is in the file ``credentials``; ``home`` has a context that names both."""

    url: str
    websocket: str
    credentials: Path
    seed: str
    home: Path
    platform: Platform


@asynccontextmanager
async def run_platform(folder: Path) -> AsyncIterator[Place]:
    (port,) = free_ports(1)
    made = make_certificates(["127.0.0.1", "localhost"], days=1)
    for name, content in (("ca.pem", made.authority), ("server.pem", made.server), ("server-key.pem", made.server_key)):
        (folder / name).write_bytes(content)
    platform, credentials = Platform(), folder / "worker.creds"
    seed = platform.write_credentials(credentials)
    tls = f'tls {{ cert_file: "{folder}/server.pem", key_file: "{folder}/server-key.pem" }}'
    config = folder / "platform.conf"
    config.write_text(platform.config([f'websocket {{ host: "127.0.0.1", port: {port}, {tls} }}']))
    websocket, home = f"wss://localhost:{port}", folder / "home"
    context = home / f"nats/context/{CONTEXT}.json"
    context.parent.mkdir(parents=True)
    described = {"description": "", "url": websocket, "creds": str(credentials), "ca": str(folder / "ca.pem"), "nsc": ""}
    context.write_text(json.dumps(described))
    async with run_server(folder / "nats", config=config) as server:
        yield Place(server.url, websocket, credentials, seed, home, platform)


def fleetbus(place: Place, *arguments: str) -> str:
    """What a command prints, which succeeds and has no secret in it."""
    done = subprocess.run(
        [sys.executable, "-m", "fleetbus_workers.cli", *arguments],
        env=os.environ | {"XDG_CONFIG_HOME": str(place.home)},
        cwd=place.home,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert place.seed not in printed and "eyJ" not in printed
    return printed


async def test_a_run_lives_in_the_account_of_a_credentials_file(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with run_platform(tmp_path) as place:
            access = build_access("init", str(place.credentials), RUN)
            async with connect(place.url, run=RUN, role="init", **access) as bus:
                await bus.declare(PLAN)
            async with connect(place.url, run=RUN, role="environment", worker="e", **access) as bus:
                await bus.publish(SUBJECTS.episode("e1"), b"x")
                assert [entry.payload async for entry in bus.scan([SUBJECTS.episodes])] == [b"x"]
            with pytest.raises(UserError, match="refused the credentials"):
                async with connect(place.url, run=RUN, role="init"):
                    pass


@pytest.mark.parametrize("is_websocket", [False, True])
@pytest.mark.parametrize("meanwhile", [b"", b"-----BEGIN NATS USER JWT-----\nhalf\n"])
async def test_a_credentials_file_that_is_being_written_delays_a_reconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_websocket: bool, meanwhile: bytes
) -> None:
    with anyio.fail_after(30):
        async with run_platform(tmp_path) as place:
            monkeypatch.setenv("XDG_CONFIG_HOME", str(place.home))
            whole = place.credentials.read_bytes()
            access = Access() if is_websocket else build_access("init", str(place.credentials), RUN)
            async with connect(CONTEXT if is_websocket else place.url, run=RUN, role="init", **access) as bus:
                await bus.declare(PLAN)
                place.credentials.write_bytes(meanwhile)
                await bus._connection.wire.force_reconnect()
                await anyio.sleep(0.5)
                place.credentials.write_bytes(whole)
                with anyio.fail_after(10):
                    await bus.publish(SUBJECTS.episode("e1"), b"x")


async def test_the_rights_in_a_users_token_are_kept(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with run_platform(tmp_path) as place:
            narrow = tmp_path / "narrow.creds"
            place.platform.write_credentials(narrow, pub={"deny": [SUBJECTS.train("default")]})
            async with connect(place.url, run=RUN, role="init", **build_access("init", str(narrow), RUN)) as bus:
                await bus.declare(PLAN)
                await bus.publish(SUBJECTS.episode("e1"), b"x")
                with pytest.raises(NotPermitted, match="does not let the user init publish"):
                    await bus.publish(SUBJECTS.train("default"), b"x")


@pytest.mark.integration
async def test_commands_go_by_a_context_to_a_websocket_behind_tls(tmp_path: Path) -> None:
    with anyio.fail_after(55):
        async with run_platform(tmp_path) as place:

            async def run(*arguments: str) -> str:
                return await anyio.to_thread.run_sync(fleetbus, place, *arguments)

            await run("init", "--run", RUN, "--nats", CONTEXT)
            assert RUN in await run("runs", "list", "--nats", CONTEXT)
            assert f"server at {CONTEXT}" in await run("doctor", "--nats", CONTEXT, "--json")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_run_trains_over_a_websocket_and_its_secrets_stay_in_their_files(tmp_path: Path) -> None:
    def train(place: Place) -> tuple[bytes, list[bytes]]:
        small = [
            "--steps=2",
            "--learner-groups=2",
            "--learner-group-size=4",
            "--evaluation-episodes=4",
            "--no-evaluation-greedy",
        ]
        command = [sys.executable, "-m", "fleetbus_workers.cli", "up", f"--nats={CONTEXT}", *small]
        variables, shown = os.environ | {"XDG_CONFIG_HOME": str(place.home)}, []
        with subprocess.Popen(
            command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as running:
            assert running.stdout is not None
            try:
                printed = b""
                for line in running.stdout:
                    printed += line
                    shown += shown_by_ps(running.pid)
                assert running.wait(timeout=60) == 0, printed[-4000:]
            finally:
                running.terminate()
        return printed, shown

    async with run_platform(tmp_path) as place:
        printed, shown = await anyio.to_thread.run_sync(train, place)
        written = [file.read_bytes() for file in (tmp_path / ".fleetbus").rglob("*") if file.is_file()]
        secrets = (place.seed.encode(), place.credentials.read_bytes().splitlines()[1])
    assert written and any(CONTEXT.encode() in each for each in shown)
    assert not any(secret in text for secret in secrets for text in (printed, *shown, *written))


async def test_a_key_that_is_given_goes_before_that_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(50):
        async with run_platform(tmp_path) as place:
            monkeypatch.setenv("XDG_CONFIG_HOME", str(place.home))
            stranger = tmp_path / "stranger.creds"
            Platform().write_credentials(stranger)
            with pytest.raises(UserError, match="refused the credentials"):
                async with connect(CONTEXT, run=RUN, role="init", **build_access("init", str(stranger), RUN)):
                    pass
            async with connect(CONTEXT, run=RUN, role="init"):
                pass


async def test_a_websocket_of_another_authority_is_refused_in_one_line(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with run_platform(tmp_path) as place:
            with pytest.raises(UserError) as refused:
                async with connect(place.websocket, run=RUN, role="init", credentials=place.credentials):
                    pass
            assert "\n" not in str(refused.value) and "context with its ca" in str(refused.value)


@asynccontextmanager
async def serving(answer: Callable[[SocketStream], Awaitable[None]]) -> AsyncIterator[int]:
    """A server that is no nats-server; the port that it listens to."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        group.cancel_scope.cancel()


@pytest.mark.integration
async def test_a_web_server_that_is_no_nats_server_is_refused_in_one_line(tmp_path: Path) -> None:
    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with anyio.fail_after(30):
        async with serving(answer) as port:
            with pytest.raises(UserError, match="no NATS server"):
                async with connect(f"ws://127.0.0.1:{port}", run=RUN, role="init"):
                    pass


async def test_who_connects_is_never_said_in_the_clear_where_tls_was_asked_for() -> None:
    heard = bytearray()

    async def greet(stream: SocketStream) -> None:
        async with stream:
            await stream.send(b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"headers":true}\r\n')
            while True:
                heard.extend(await stream.receive())

    with anyio.fail_after(30):
        async with serving(greet) as port:
            with pytest.raises(UserError, match="offers no TLS, which tls:// asks for"):
                async with connect(f"tls://somebody:secret@127.0.0.1:{port}", run=RUN, role="init"):
                    pass
    assert not heard
