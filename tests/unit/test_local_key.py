"""The key of a server of `up` is found by its greeting, and nothing else that listens on loopback gets anything."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest

from fleetbus.auth.keys import create_seed, public_key
from fleetbus.auth.local_key import write_local_config
from fleetbus.bus.nats.local_key import KEY_FILE, find_loopback, name_server, read_local_key
from fleetbus.concurrency.task_groups import open_flat_task_group
from fleetbus.errors import UserError
from fleetbus.files import create_private_folder


@asynccontextmanager
async def greeting(text: bytes) -> AsyncIterator[str]:
    """The URL of what says this to whoever connects, and hangs up."""

    async def greet(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(text)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, open_flat_task_group() as tasks:
        tasks.start_soon(listener.serve, greet)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        yield f"nats://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


def info(folder: Path, **fields: object) -> bytes:
    said = {"server_name": name_server(folder), "auth_required": True} | fields
    return b"INFO " + msgspec.json.encode(said) + b" \r\n"


async def read(text: bytes) -> str:
    async with greeting(text) as url:
        return await read_local_key(url, give_up_at=anyio.current_time())


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("nats://127.0.0.1:4333", ("127.0.0.1", 4333)),
        ("127.0.0.1", ("127.0.0.1", 4222)),
        ("nats://localhost:1", ("localhost", 1)),
        ("nats://[::1]:7", ("::1", 7)),
        ("nats://127.0.0.1:1,nats://127.0.0.1:2", None),
        ("nats://user:password@127.0.0.1:1", None),
        ("tls://127.0.0.1:1", None),
        ("ws://127.0.0.1:1", None),
        ("nats://example.com:1", None),
        ("nats://192.0.2.1:1", None),
        ("nats://127.0.0.1:none", None),
        ("", None),
    ],
)
def test_a_key_is_looked_up_for_one_address_of_this_machine(url: str, found: object) -> None:
    assert find_loopback(url) == found


async def test_the_key_is_read_from_the_folder_that_the_server_is_called_after(tmp_path: Path) -> None:
    folder = tmp_path / "a folder with ünusual %20 letters"
    write_local_config(folder)
    assert (await read(info(folder))).encode() == (folder / KEY_FILE).read_bytes()
    assert write_local_config(folder).name == "local.conf"
    assert (await read(info(folder))).encode() == (folder / KEY_FILE).read_bytes()


async def test_of_other_servers_nothing_is_read(tmp_path: Path) -> None:
    write_local_config(tmp_path)
    others = [
        info(tmp_path, auth_required=False),
        info(tmp_path, server_name="n1"),
        info(tmp_path, server_name=str(tmp_path)),
        info(tmp_path, server_name=3),
        b"INFO nonsense\r\n",
        b"HTTP/1.0 400 Bad Request\r\n",
        b"INFO []\r\n",
        b"\xff" * 100_000,
        b"",
    ]
    assert [await read(text) for text in others] == [""] * len(others)


async def test_where_nothing_listens_no_key_is_needed() -> None:
    assert await read_local_key("nats://127.0.0.1:1", give_up_at=anyio.current_time() + 0.1) == ""


async def test_a_server_that_names_a_folder_with_something_else_gets_no_answer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / KEY_FILE)
    with pytest.raises(UserError, match=r"local\.nk contains no nkey seed: remove it, and start again"):
        await read(info(tmp_path))
    (tmp_path / KEY_FILE).unlink()
    (tmp_path / "other.nk").write_bytes(create_seed())
    (tmp_path / KEY_FILE).symlink_to("other.nk")
    with pytest.raises(UserError, match="lets in who can read"):
        await read(info(tmp_path))
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(UserError, match=r"local\.nk \(No such file or directory\): run this as the user and on the machine"):
        await read(info(tmp_path))


def test_the_configuration_holds_the_public_key_and_no_file_is_readable_by_others(tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    config = msgspec.json.decode(write_local_config(folder, "fb_a").read_bytes())
    assert config["accounts"]["fb_a"]["users"] == [{"nkey": public_key(folder / KEY_FILE)}]
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_ones_own_says_what_is_in_its_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be used as a folder"):
            create_private_folder(folder)
    create_private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
