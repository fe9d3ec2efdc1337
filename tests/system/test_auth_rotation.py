"""Keys replaced and withdrawn on a running server: the old one is out upon the next reload, everybody else goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import anyio
import pytest

from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.rotation import NEXT, revoke_key, rotate_key
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.client_wire import ClientWire
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import BusClosed, UserError
from fleetbus.secret_files import create_secret_file
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.program import run_program
from tests.support.small_deployment import LANES

RUN = "rotated"
PLAN = plan_run(RUN, lanes=LANES, max_bytes=1 << 28)
SUBJECTS = Subjects(RUN)


class Place:
    def __init__(self, keys: AuthFolder, server: NatsServerProcess) -> None:
        self.keys = keys
        self.server = server

    @asynccontextmanager
    async def connect(self, role: str, keys: AuthFolder | None = None) -> AsyncIterator[Bus]:
        access = build_access(role, str((keys or self.keys).path), RUN)
        async with connect(self.server.url, run=RUN, role=role, worker=f"{role}-1", **access) as bus:
            yield bus

    async def publish(self, role: str, name: str) -> None:
        async with self.connect(role) as bus:
            await bus.publish(SUBJECTS.life(role, name), b"x")

    def reload(self) -> None:
        os.kill(self.server.pid, signal.SIGHUP)

    def copy_keys(self, folder: Path) -> AuthFolder:
        folder.mkdir()
        for file in self.keys.path.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return AuthFolder(folder)


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    keys = AuthFolder(folder / "keys")
    write_folder(keys, [PLAN], hosts=["127.0.0.1"], days=1)
    with anyio.fail_after(50):
        async with run_server(folder / "nats", config=keys.server_config) as server:
            made = Place(keys, server)
            async with made.connect("init") as bus:
                await bus.declare(PLAN)
            yield made


async def until_refused(made: Place, role: str, keys: AuthFolder) -> None:
    while True:
        try:
            async with made.connect(role, keys):
                await anyio.sleep(0.02)
        except UserError as refused:
            assert "refused the credentials" in str(refused)
            return
        except BusClosed:  # it was let in just before the reload
            continue


async def test_a_replaced_key_is_out_upon_the_reload_and_the_new_one_and_all_others_go_on(tmp_path: Path) -> None:
    async with place(tmp_path) as made, made.connect("learner") as learner:
        before = made.copy_keys(tmp_path / "before")
        with pytest.raises(BusClosed):
            async with made.connect("environment") as bus, bus.pull(PLAN.consumers[0].name, credits=1) as pulling:
                rotate_key(made.keys, RUN, "environment")
                made.reload()
                await pulling.receive()
        await until_refused(made, "environment", before)
        await made.publish("environment", "new")
        await learner.publish(SUBJECTS.life("learner", "l"), b"x")


async def test_consumers_keep_their_names_when_the_admins_key_is_replaced(tmp_path: Path) -> None:
    async with place(tmp_path) as made:
        names = made.keys.names(PLAN)
        before = made.copy_keys(tmp_path / "before")
        for _ in range(2):
            rotate_key(made.keys, RUN, "admin")
        made.reload()
        await until_refused(made, "init", before)
        assert made.keys.names(PLAN) == names
        async with made.connect("environment") as bus, bus.pull(PLAN.consumers[0].name, credits=1) as pulling:
            async with made.connect("init") as admin:
                await admin.declare(PLAN)
            async with made.connect("learner") as learner:
                await learner.publish(SUBJECTS.task("default", "e0"), b"x")
            assert (await pulling.receive()).message.payload == b"x"


async def test_a_withdrawn_key_is_out_and_auth_init_makes_another(tmp_path: Path) -> None:
    async with place(tmp_path) as made:
        before = made.copy_keys(tmp_path / "before")
        revoke_key(made.keys, RUN, "gateway")
        made.reload()
        await until_refused(made, "gateway", before)
        assert write_folder(made.keys, [PLAN], hosts=["127.0.0.1"], days=1).keys == (f"{RUN}.gateway",)


def test_a_rotation_that_was_cut_off_at_any_point_goes_on_when_it_is_asked_for_again(tmp_path: Path) -> None:
    keys = AuthFolder(tmp_path)
    write_folder(keys, [PLAN], hosts=["127.0.0.1"], days=1)
    key, config = keys.key(RUN, "learner"), keys.server_config
    old, text = key.read_bytes(), config.read_text()
    made = rotate_key(keys, RUN, "learner")
    new = key.read_bytes()
    for stored in (text, config.read_text()):  # the new key was written; the configuration was, too
        key.with_name(key.name + NEXT).write_bytes(new)
        key.write_bytes(old)
        config.write_text(stored)
        assert rotate_key(keys, RUN, "learner").new == made.new
        assert key.read_bytes() == new and made.new in config.read_text() and made.old not in config.read_text()
        assert not key.with_name(key.name + NEXT).exists()


def test_keys_that_are_replaced_at_the_same_time_are_all_in_the_configuration(tmp_path: Path) -> None:
    keys, users = AuthFolder(tmp_path), ("learner", "recorder", "gateway")
    write_folder(keys, [plan_run(RUN, lanes=16)], hosts=["127.0.0.1"], days=1)
    with ThreadPoolExecutor(len(users)) as threads:
        replaced = list(threads.map(lambda user: rotate_key(keys, RUN, user), users))
    text = keys.server_config.read_text()
    assert all(each.new in text and each.old not in text for each in replaced)


def test_who_is_cut_off_while_it_writes_a_secret_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty secret of the consumers would give them names that anybody can compute."""
    keys = AuthFolder(tmp_path)
    write_folder(keys, [PLAN], hosts=["127.0.0.1"], days=1)
    names = keys.names(PLAN)

    def cut_off(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "fdopen", cut_off)
        create_secret_file(keys.consumer_secret(RUN), b"secret")
    assert keys.names(PLAN) == names
    rotate_key(keys, RUN, "admin")
    assert keys.names(PLAN) == names


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rotate", "DIR", "nobody"], "there is no user 'nobody': choose one of admin, "),
        (["rotate", "DIR", "learner", "--run", "other"], "fleetbus auth init writes the keys of a run"),
        (["revoke", "DIR", "admin", "--run", RUN], "a run needs its admin: fleetbus auth rotate replaces the key"),
    ],
)
def test_what_cannot_be_replaced_is_named_in_one_line_and_nothing_changes(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(AuthFolder(tmp_path), [PLAN], hosts=["127.0.0.1"], days=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert run_program(["auth", *(str(tmp_path) if each == "DIR" else each for each in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.integration
async def test_a_worker_whose_key_was_replaced_says_so_in_one_line_and_exits_with_1(tmp_path: Path) -> None:
    async with place(tmp_path) as made:
        command = [sys.executable, "-m", "fleetbus", "recorder", "--run", RUN, "--nats", made.server.url, "--nats-auth"]
        options = [str(made.keys.path), "--archive", str(tmp_path / "archive"), "--run-folder", str(tmp_path / "runs")]
        async with await anyio.open_process([*command, *options, "--log-format", "json"], cwd=tmp_path) as worker:
            assert worker.stdout is not None and worker.stderr is not None
            said = b""
            while b'"ready"' not in said:
                said += await worker.stderr.receive()
            rotate_key(made.keys, RUN, "recorder")
            made.reload()
            async for part in worker.stderr:
                said += part
            assert await worker.wait() == 1
    (error,) = [line for line in map(json.loads, said.splitlines()) if line["level"] == "error"]
    assert error["event"] == "stopped: the connection is closed for good"
    assert error["reason"] == "the NATS server refuses the credentials"


async def test_a_monitors_readers_change_their_names_with_its_key(tmp_path: Path) -> None:
    async with place(tmp_path) as made, made.connect("learner") as learner:
        await learner.publish(SUBJECTS.life("learner", "l"), b"x")
        before = made.copy_keys(tmp_path / "before")
        names = made.keys.access(PLAN).readers["monitor"]
        rotate_key(made.keys, RUN, "monitor")
        assert not any(name in made.keys.server_config.read_text() for name in names)
        made.reload()
        await until_refused(made, "monitor", before)
        async with made.connect("monitor") as bus:
            assert [entry.payload async for entry in bus.scan([SUBJECTS.log])] == [b"x"]


async def test_only_a_connection_that_opens_raises_its_refusal_in_the_client_s_own_task() -> None:
    """Later it is known to who waits, and there it would be logged as an exception that nobody retrieved."""
    refusal = RuntimeError("nats: 'Authorization Violation'")
    async with anyio.create_task_group() as tasks:
        connection = Connection(tasks, "_INBOX_r", "recorder-1", "$JS.API")
        with pytest.raises(UserError, match="refused the credentials"):
            await connection.on_error(refusal)
        connection.set_wire(ClientWire(connection.on_crash, tasks))
        connection.start()
        await connection.close()
        await connection.on_error(refusal)
        tasks.cancel_scope.cancel()
