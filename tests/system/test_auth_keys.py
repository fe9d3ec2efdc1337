"""Keys and certificates as `fleetbus auth init` writes them: who gets in, where they stand, what is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest

from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, NatsSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Heartbeat, Subjects, encode
from fleetbus_schemas.channels import ROLES
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.up.checks import check_rights
from tests.support.secured_server import TRUST, SecuredServer, secured_server
from tests.support.small_deployment import RUN

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


async def test_without_a_key_nobody_gets_in(secured: SecuredServer) -> None:
    access = build_access("monitor", str(secured.folder), TRUST)
    with pytest.raises(UserError, match="refused the credentials"):
        async with connect(secured.server.url, run=TRUST, tls=access["tls"]):
            raise AssertionError
    with pytest.raises(UserError, match="speaks TLS: give --nats-auth"):
        async with connect(secured.server.url, run=TRUST):
            raise AssertionError


async def test_a_key_of_another_fleet_is_refused_and_so_is_its_server(secured: SecuredServer, tmp_path: Path) -> None:
    write_folder(AuthFolder(tmp_path), [plan_run(TRUST)], hosts=["127.0.0.1"], days=1)
    with pytest.raises(UserError, match="is not the one that was expected"):
        async with connect(secured.server.url, run=TRUST, **build_access("monitor", str(tmp_path), TRUST)):
            raise AssertionError
    (tmp_path / "ca.pem").write_bytes((secured.folder / "ca.pem").read_bytes())
    with pytest.raises(UserError, match="refused the credentials"):
        async with connect(secured.server.url, run=TRUST, **build_access("monitor", str(tmp_path), TRUST)):
            raise AssertionError


async def test_a_client_with_keys_says_nothing_in_the_clear(secured: SecuredServer) -> None:
    """Whoever stands in for the server and claims to speak no TLS hears the beginning of a handshake and nothing else."""
    list_subscriptions = bytearray()

    async def impostor(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
            with anyio.move_on_after(5):
                async for chunk in stream:
                    list_subscriptions.extend(chunk)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, impostor)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(UserError):
            async with connect(f"nats://127.0.0.1:{port}", run=TRUST, **build_access("monitor", str(secured.folder), TRUST)):
                raise AssertionError
        tasks.cancel_scope.cancel()
    assert list_subscriptions[:1] == b"\x16"  # a TLS handshake record
    assert b"CONNECT" not in list_subscriptions and b"PUB" not in list_subscriptions


def test_secrets_are_readable_by_their_owner_alone_and_stand_in_no_other_file(secured: SecuredServer) -> None:
    keys = [AuthFolder(secured.folder).key(run, user) for run in (TRUST, RUN) for user in ROLES]
    secrets = [key.read_bytes() for key in keys]
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in secured.folder.iterdir()} == {
        **{key.name: "0o600" for key in keys},
        "server-key.pem": "0o600",
        "ca.pem": "0o644",
        "server.pem": "0o644",
        "nats-server.conf": "0o600",
    }
    files = [file for file in secured.folder.iterdir() if file.suffix != ".nk"]
    assert [file.name for file in files for secret in secrets if secret in file.read_bytes()] == []
    assert [secret for secret in secrets if secret in (secured.server.store / "nats-server.log").read_bytes()] == []


def test_writing_again_keeps_keys_and_certificates_and_allows_the_new_run(tmp_path: Path) -> None:
    folder = AuthFolder(tmp_path)
    first = write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    second = write_folder(folder, [plan_run("a", lanes=1), plan_run("b", lanes=1)], hosts=["localhost"], days=1)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(first.keys) == {f"a.{user}" for user in ROLES} and first.certificates
    assert set(second.keys) == {f"b.{user}" for user in ROLES} and not second.certificates
    assert [name for name in before if before[name] != after[name]] == ["nats-server.conf"]
    assert b"fb.b.task.*.*" in after["nats-server.conf"] and b"fb.b.task.*.*" not in before["nats-server.conf"]


def test_a_folder_that_lacks_something_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    folder = AuthFolder(tmp_path)
    with pytest.raises(UserError, match=r"no certificate authority at .*ca\.pem"):
        build_access("monitor", str(tmp_path), "a")
    write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    folder.key("a", "monitor").unlink()
    with pytest.raises(UserError, match=r"no key of the user monitor of run a at .*a\.monitor\.nk"):
        build_access("top", str(tmp_path), "a")
    folder.authority.unlink()
    with pytest.raises(UserError, match=r"lacks ca\.pem"):
        write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    secret = "S" + "A" * 20
    folder.key("a", "learner").write_text(secret)
    folder.authority.write_text("x")
    with pytest.raises(UserError, match="contains no nkey seed") as caught:
        write_folder(folder, [plan_run("a", lanes=1)], hosts=["localhost"], days=1)
    assert secret not in str(caught.value)


def test_without_a_folder_nothing_is_asked() -> None:
    assert build_access("learner", "", "default") == {}
    assert msgspec.structs.asdict(RunSettings())["name"] == "default"
    assert encode(Heartbeat(role="monitor", worker="m"))


def test_up_refuses_keys_that_do_not_allow_its_run_and_says_what_would(tmp_path: Path) -> None:
    auth = str(tmp_path / "keys")

    def check(run: str, *, lanes: int = 16, policy: str = "default", seats: str = "", url: str = "") -> None:
        tables = (RunSettings(name=run, policy=policy, seats=seats), NatsSettings(auth=auth, lanes=lanes, url=url))
        check_rights(Configuration(run=tables[0], nats=tables[1]))

    with pytest.raises(UserError, match="no configuration for the server"):
        check("default")
    check("default", url="tls://host:4222")
    assert run_program(["auth", "init", auth, "--run", "default", "--run", "other"]) == 0
    check("default")
    check("other")
    with pytest.raises(UserError, match=r"does not allow run safe: .* --run default --run other --run safe$"):
        check("safe")
    with pytest.raises(UserError, match=r"--run default --run other --lanes 32$"):
        check("other", lanes=32)
    added = r"does not allow policy user in run other: .* --run default --run other --policy default --policy user$"
    with pytest.raises(UserError, match=added):
        check("other", seats="user=http://127.0.0.1:8000/v1")
    added = r"does not allow policies second, b in run other: .* --policy default --policy second --policy b$"
    with pytest.raises(UserError, match=added):
        check("other", seats="second=league:newest\nseat=b")
    with pytest.raises(UserError, match=r"does not allow policy b in run other"):
        check("other", seats="seat=b", url="tls://host:4222")
    check("other", lanes=32, url="tls://host:4222")
    with pytest.raises(UserError, match=r"does not allow policy p .* --run default --run other --policy default --policy p$"):
        check("other", policy="p")
    assert run_program(["auth", "init", auth, "--run", "default", "--run", "other", "--run", "safe"]) == 0
    check("safe")
    AuthFolder(Path(auth)).server_config.write_text("# one's own\n")
    check("third")


@pytest.mark.parametrize("content", [b"", b"garbage"])
async def test_a_key_that_was_cut_is_one_line_that_says_what_to_do(
    content: bytes, tmp_path: Path, secured: SecuredServer
) -> None:
    folder, plans = AuthFolder(tmp_path / "auth"), [plan_run(TRUST, lanes=1)]
    write_folder(folder, plans, hosts=["localhost"], days=1)
    folder.key(TRUST, "monitor").write_bytes(content)
    with pytest.raises(UserError, match=r"monitor\.nk contains no nkey seed: remove it") as caught:
        write_folder(folder, plans, hosts=["localhost"], days=1)
    assert content.decode() not in str(caught.value) or not content
    folder.authority.write_bytes(AuthFolder(secured.folder).authority.read_bytes())
    with pytest.raises(UserError, match="key"):
        async with connect(secured.server.url, run=TRUST, **build_access("monitor", str(folder.path), TRUST)):
            raise AssertionError
    folder.key(TRUST, "monitor").unlink()
    assert write_folder(folder, plans, hosts=["localhost"], days=1).keys == (f"{TRUST}.monitor",)


async def test_a_further_run_is_let_in_by_a_reload_and_the_first_one_works_on(tmp_path: Path) -> None:
    folder, plans = AuthFolder(tmp_path / "keys"), [plan_run(run, lanes=1, max_bytes=1 << 26) for run in ("a", "b")]
    write_folder(folder, plans[:1], hosts=["127.0.0.1"], days=1)
    with anyio.fail_after(50):
        async with run_server(tmp_path / "store", config=folder.server_config) as server:

            def connected(role: str, run: str) -> AbstractAsyncContextManager[Bus]:
                return connect(server.url, run=run, role=role, **build_access(role, str(folder.path), run))

            async with connected("init", "a") as admin:
                await admin.declare(plans[0])
            async with connected("learner", "a") as learner, connected("environment", "a") as allow_worker_reports:
                async with allow_worker_reports.pull("task_default", credits=2) as tasks:
                    await learner.publish(Subjects("a").task("default", "e0"), b"before")
                    await (await tasks.receive()).ack()
                    write_folder(folder, plans, hosts=["127.0.0.1"], days=1)
                    os.kill(server.pid, signal.SIGHUP)
                    while True:
                        try:
                            async with connected("init", "b") as admin:
                                await admin.declare(plans[1])
                            break
                        except UserError:  # not reloaded yet
                            await anyio.sleep(0.05)
                    with pytest.raises(UserError, match="reload once more"):
                        async with connected("learner", "b"):
                            raise AssertionError("one reload is enough for nats-server by now: say so in docs/cluster.md")
                    os.kill(server.pid, signal.SIGHUP)
                    while True:
                        try:
                            async with connected("learner", "b") as other:
                                await other.publish(Subjects("b").task("default", "e0"), b"its workers, too")
                            break
                        except UserError:
                            await anyio.sleep(0.05)
                    await learner.publish(Subjects("a").task("default", "e1"), b"after")
                    assert (await tasks.receive()).message.payload == b"after"
