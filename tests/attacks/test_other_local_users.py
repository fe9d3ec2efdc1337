"""Another user of the machine knows the port of the server that `up` started: without the key in its folder it lets nobody in.

Where the tests are root the other user is real, for what the file system decides; else the key is taken from this one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.auth.keys import create_seed, public_key
from fleetbus.auth.local_key import write_local_config
from fleetbus.auth.stores import find_account
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.local_key import KEY_FILE
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.run_folder import RunFolder
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import EpisodeRequested, Subjects, Task, encode
from fleetbus_workers.run_access.shared_server import share_server
from fleetbus_workers.up.command import hold_run
from fleetbus_workers.up.server import hold_server
from tests.support.backends import asyncio_alone
from tests.support.secured_server import TRUST, secured_server

pytestmark = pytest.mark.timeout(120)

anyio_backend = asyncio_alone

RUN = "mine"
NOBODY = 65534
ENTRIES = 50
S = Subjects(RUN)


@contextmanager
def another_user(key: Path) -> Iterator[None]:
    """Be somebody else in the block, or somebody who may not read the key."""
    if os.geteuid() == 0:
        groups, group = os.getgroups(), os.getegid()
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(group)
            os.setgroups(groups)
        return
    key.chmod(0)
    try:
        yield
    finally:
        key.chmod(0o600)


@asynccontextmanager
async def own_server(folder: RunFolder) -> AsyncGenerator[str]:
    """The server of a run as `up` holds it; its URL."""
    with anyio.fail_after(100):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold_server, folder.store, 0, folder.server)
            while not folder.server.exists():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            yield str(msgspec.json.decode(folder.server.read_bytes())["url"])
            tasks.cancel_scope.cancel()


async def fill(bus: Bus) -> None:
    for number in range(ENTRIES):
        request = EpisodeRequested(
            episode_id=f"e{number}", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default",
            deadline_ns=1,
        )  # fmt: skip
        await bus.publish(S.task("default", f"e{number}"), encode(request))


async def purge_as_stranger(url: str) -> bool:
    """As any NATS client would; True if the server carried it out."""
    received = b""
    async with await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream:
        await stream.send(b"CONNECT {}\r\nSUB box 1\r\nPUB $JS.API.STREAM.PURGE.fb_%s box 0\r\n\r\n" % RUN.encode())
        while b"MSG box" not in received and b"-ERR" not in received:
            received += await stream.receive()
    assert (b"Authorization Violation" in received) != (b'"success":true' in received), received
    return b'"success":true' in received


def run_folder_of(folder: Path) -> RunFolder:
    return RunFolder(folder / RUN)


async def test_a_run_of_up_lets_no_other_user_in(tmp_path: Path) -> None:
    folder = run_folder_of(tmp_path)
    with hold_run(Configuration(), folder):
        async with own_server(folder) as url:
            async with connect(url, run=RUN) as bus:
                await bus.declare(plan_run(RUN, lanes=1))
                await fill(bus)
            assert not await purge_as_stranger(url)
            with another_user(folder.store / KEY_FILE):
                with pytest.raises(
                    UserError, match=r"lets in who can read .*local\.nk \(Permission denied\): run this as the user"
                ):
                    async with connect(url, run=RUN):
                        pass
            async with connect(url.replace("127.0.0.1", "localhost"), run=RUN) as bus:
                assert (await bus.log_state()).entries == ENTRIES


@pytest.mark.integration
async def test_files_that_are_only_looked_at_are_served_to_their_user_alone(tmp_path: Path) -> None:
    folder = run_folder_of(tmp_path)
    with hold_run(Configuration(), folder):
        async with own_server(folder) as url, connect(url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            await fill(bus)
    folder.server.unlink()
    with anyio.fail_after(100):
        async with share_server(folder) as url, connect(url, run=RUN) as bus:
            assert not await purge_as_stranger(url)
            assert (await bus.log_state()).entries == ENTRIES


async def test_a_log_that_was_begun_with_keys_is_served_to_its_user_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = await anyio.to_thread.run_sync(begin_with_keys, tmp_path_factory)
    async with run_server(store, config=write_local_config(store, find_account(store, TRUST))) as server:
        assert not await purge_as_stranger(server.url)
        async with connect(server.url, run=TRUST) as bus:
            await bus.check_log(reading=True)


def begin_with_keys(folders: pytest.TempPathFactory) -> Path:
    with secured_server(folders) as secured:
        return secured.server.store


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("earlier", [0o777, 0o755], ids=oct)
def test_what_a_run_writes_is_closed_to_others_also_where_an_earlier_version_left_it_open(earlier: int) -> None:
    with tempfile.TemporaryDirectory() as parent:  # which others may enter, as they may not pytest's
        os.chmod(parent, 0o755)
        folder = run_folder_of(Path(parent))
        for path in (folder.path, folder.store):
            path.mkdir()
            path.chmod(earlier)
        folder.configuration.write_text("{}")
        with another_user(folder.store / KEY_FILE):
            assert folder.configuration.read_text() == "{}"
        with hold_run(Configuration(), folder):
            write_local_config(folder.store)
            with another_user(folder.store / KEY_FILE):
                for path in (folder.configuration, folder.port, folder.store / KEY_FILE, folder.store / "local.conf"):
                    with pytest.raises(PermissionError):
                        path.read_bytes()
        assert stat.S_IMODE((folder.store / KEY_FILE).stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("how", ["file", "link"])
def test_a_key_that_somebody_planted_in_a_folder_that_was_open_is_not_let_in(how: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder, theirs = run_folder_of(Path(parent)), Path(parent, "theirs")
        folder.store.mkdir(parents=True)
        theirs.mkdir()
        for path in (folder.path, folder.store, theirs):
            path.chmod(0o777)
        planted = folder.store / KEY_FILE if how == "file" else theirs / "key"
        with another_user(planted):
            planted.write_bytes(create_seed())
            if how == "link":
                (folder.store / KEY_FILE).symlink_to(planted)
        known = public_key(planted)
        with hold_run(Configuration(), folder):
            config = write_local_config(folder.store).read_text()
        assert known not in config and public_key(folder.store / KEY_FILE) in config
        assert (folder.store / KEY_FILE).lstat().st_uid == 0 and stat.S_ISREG((folder.store / KEY_FILE).lstat().st_mode)


def test_a_new_folder_of_a_run_is_its_users_alone_and_a_group_that_was_let_in_stays_so(tmp_path: Path) -> None:
    folder = run_folder_of(tmp_path)
    with hold_run(Configuration(), folder):
        write_local_config(folder.store)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.store)] == [0o700, 0o700]
    for before, after in ((0o755, 0o700), (0o2750, 0o2750)):
        folder.path.chmod(before)
        with hold_run(Configuration(), folder):
            assert stat.S_IMODE(folder.path.stat().st_mode) == after
