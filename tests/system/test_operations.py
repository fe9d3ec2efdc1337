"""Deeds have their key: what is done to a run stands in its log under the key that did it, on a real server with keys."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.keys import public_key
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.core.audit.operations import KEPT_OPERATIONS
from fleetbus.errors import NotPermitted
from fleetbus.log.operations import ENDING
from fleetbus_schemas import OperationRecorded, Subjects, encode
from fleetbus_schemas.channels import ROLES
from fleetbus_workers.cli.program import run_program
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, secured_server
from tests.support.small_deployment import LANES

pytestmark = pytest.mark.integration

FORGED = encode(OperationRecorded(operation="purge", targets=("everything",), count=1))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


def key_of(folder: Path, user: str, run: str = TRUST) -> str:
    return public_key(AuthFolder(folder).key(run, user))


def read_audit(capsys: pytest.CaptureFixture[str], *options: str, run: str = TRUST) -> dict[str, Any]:
    capsys.readouterr()
    run_program(["audit", run, "--json", *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["operations"]
    return found


def test_cancel_drain_and_pause_are_in_the_audit_and_in_top_under_the_operators_key(
    secured: SecuredServer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--nats", secured.server.url, "--nats-auth", str(secured.folder))
    before = read_audit(capsys, *options)["counted"]
    assert run_program(["cancel", "e1", "e2", "--run", TRUST, *options]) == 2
    assert run_program(["drain", "environment-7", "--run", TRUST, *options]) == 2
    assert run_program(["pause", TRUST, *options]) == 2
    assert run_program(["pause", TRUST, "--resume", *options]) == 2
    found = read_audit(capsys, *options)
    assert found["counted"] == before + 4
    newest = found["newest"][-4:]
    assert [each["operation"] for each in newest] == ["cancel", "drain", "pause", "resume"]
    assert {(each["role"], each["key"]) for each in newest} == {("operator", key_of(secured.folder, "operator"))}
    assert [each["targets"] for each in newest[:2]] == [["e1", "e2"], ["environment-7"]]
    assert run_program(["audit", TRUST, *options]) in (0, 1)
    line = f"operator {key_of(secured.folder, 'operator')[:12]} drain environment-7 (says drain-"
    assert line in capsys.readouterr().out
    assert run_program(["top", TRUST, "--once", "--json", *options]) in (0, 1)
    shown = json.loads(capsys.readouterr().out)["operations"]
    assert [each["operation"] for each in shown][-4:] == ["cancel", "drain", "pause", "resume"]


@pytest.mark.parametrize("user", [role for role in ROLES if role not in ("admin", "operator")])
async def test_no_other_key_can_write_in_the_operators_name(secured: SecuredServer, user: str) -> None:
    for role, key in (("operator", "operator"), ("admin", "admin"), (user, user)):
        async with secured.connect(user) as bus:
            with pytest.raises(NotPermitted):
                await bus.publish(SUBJECTS.operation(role, key_of(secured.folder, key)), FORGED, timeout=5)


async def test_the_operators_key_cannot_write_in_the_name_of_another_key(secured: SecuredServer) -> None:
    names = [("admin", "admin"), ("operator", "admin"), ("operator", "monitor")]
    names += [("environment", "environment"), ("admin", "operator")]
    for role, key in names:
        async with secured.connect("operator") as bus:
            with pytest.raises(NotPermitted):
                await bus.publish(SUBJECTS.operation(role, key_of(secured.folder, key)), FORGED, timeout=5)
    async with secured.connect("operator") as bus:
        with pytest.raises(NotPermitted):
            await bus.publish(f"fb.{TRUST}.operation.operator", FORGED, timeout=5)
        await bus.publish(SUBJECTS.operation("operator", key_of(secured.folder, "operator")), FORGED, timeout=5)


async def test_entries_that_are_none_change_nothing_and_the_list_is_bounded(
    secured: SecuredServer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--nats", secured.server.url, "--nats-auth", str(secured.folder))
    own = SUBJECTS.operation("operator", key_of(secured.folder, "operator"))
    long = OperationRecorded(
        operation="x" * 5_000, targets=("t" * 5_000,) * 100, count=-1, author="a\nb\x1b[2J" * 1000, at_ns=1 << 62
    )
    async with secured.connect("operator") as bus:
        await bus.publish(own, b"\xc1 no message")
        for _ in range(KEPT_OPERATIONS + 3):
            await bus.publish(own, encode(long))
    async with secured.connect("admin") as bus:
        await bus.publish(f"fb.{TRUST}.operation.a.b.c", FORGED)
        await bus.publish(f"fb.{TRUST}.operation", FORGED)
    found = await anyio.to_thread.run_sync(lambda: read_audit(capsys, *options))
    assert len(found["newest"]) == KEPT_OPERATIONS < found["counted"]
    last = found["newest"][-1]
    assert (len(last["operation"]), len(last["targets"]), last["count"], last["at_ns"]) == (32, 16, 16, 0)
    assert max(map(len, last["targets"])) == 128 and len(last["author"]) == 200
    status = await anyio.to_thread.run_sync(run_program, ["audit", TRUST, *options])
    shown = capsys.readouterr().out
    assert status in (0, 1) and "\x1b" not in shown
    assert f"{found['counted']} operations, the newest {KEPT_OPERATIONS}:" in shown
    assert all(line.startswith("    20") for line in shown.splitlines() if " xxx" in line)


async def test_changed_rights_and_a_removed_run_are_in_the_log_that_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, keys = "moved", AuthFolder(tmp_path / "keys")
    plan, subjects = plan_run(run, lanes=LANES, max_bytes=1 << 28), Subjects(run)
    write_folder(keys, [plan], hosts=["127.0.0.1"], days=1)

    def connected(user: str) -> AbstractAsyncContextManager[Bus]:
        access = build_access(user, str(keys.path), run)
        return connect(server.url, run=run, role=user, worker=f"{user}-1", **access)

    async def program(*arguments: str) -> None:
        assert await anyio.to_thread.run_sync(run_program, list(arguments)) == 0, capsys.readouterr()

    with anyio.fail_after(100):
        async with run_server(tmp_path / "nats", config=keys.server_config) as server:
            options = ("--nats", server.url, "--nats-auth", str(keys.path))
            declare = ("init", "--run", run, "--nats-lanes", str(LANES), "--nats-max-bytes", str(1 << 28), *options)
            await program(*declare)
            admin, operator = key_of(keys.path, "admin", run), key_of(keys.path, "operator", run)
            await program("auth", "rotate", str(keys.path), "operator", "--run", run)
            await program("auth", "rotate", str(keys.path), "admin", "--run", run)
            await program("auth", "revoke", str(keys.path), "gateway", "--run", run)
            await program("auth", "renew", str(keys.path))
            os.kill(server.pid, signal.SIGHUP)
            await _until_let_in(connected)
            await program(*declare)
            found = await anyio.to_thread.run_sync(lambda: read_audit(capsys, *options, run=run))
            told = [(each["role"], each["key"], each["operation"], each["targets"][:2]) for each in found["newest"]]
            now = key_of(keys.path, "admin", run)
            assert now != admin
            assert told[:2] == [
                ("admin", admin, "rotate", ["operator", operator]),
                ("admin", admin, "rotate", ["admin", admin]),
            ]
            assert [each[:3] for each in told[2:]] == [("admin", now, "revoke"), ("admin", now, "renew")]
            assert not (keys.path / f"{run}{ENDING}").exists()
            own = subjects.operation("operator", operator)
            async with connected("operator") as bus:
                with pytest.raises(NotPermitted):  # the name of the key that was replaced
                    await bus.publish(own, FORGED, timeout=5)
            await program("runs", "rm", run, "--yes", *options)
            assert ((keys.path / f"{run}{ENDING}").stat().st_mode & 0o777) == 0o600
            await program(*declare)
            found = await anyio.to_thread.run_sync(lambda: read_audit(capsys, *options, run=run))
            assert [(each["key"], each["operation"], each["targets"]) for each in found["newest"]] == [(now, "purge", [run])]


async def _until_let_in(connected: Any) -> None:
    """Until the reload is done: the server knows the new admin."""
    while True:
        try:
            async with connected("admin"):
                return
        except Exception as refused:
            assert "refuse" in str(refused) or "refuse" in repr(refused)
            await anyio.sleep(0.1)
