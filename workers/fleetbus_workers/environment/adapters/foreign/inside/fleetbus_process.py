"""One process per episode, forked from a warm server: for packages that keep state per process, or run what the policy wrote.

Used by the kinds beside it. A process that is cancelled, hangs or dies ends alone. Standard library alone.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

RESULT_BYTES = 1 << 20
LAST_SECONDS = 1.0
"""What a process wrote is read for so long after its end."""


class EpisodeFailed(Exception):
    """The package recorded an error for an episode, or its process ended without a result."""


def prepare_server(modules: Sequence[str]) -> Any:
    """A server that has imported ``modules`` when it forks, as far as they can be imported. It starts now.

    Python's own list of modules is no such thing: any error but an ImportError ends the server, and it finds no file here.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["fleetbus_preload"])
    path = os.environ.get("PYTHONPATH")
    found = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    ours = {"PYTHONPATH": found, "FLEETBUS_PRELOAD": json.dumps([list(modules), path])}
    os.environ |= ours
    try:
        ensure_running()
    finally:
        for name in ours:
            del os.environ[name]
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return server


async def call_in_process(server: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of a module, called in a process of its own. Raises `EpisodeFailed`; cancelled, it ends it.

    It comes as one line of JSON, which runs no code here, unlike what a pickle names: the policy's code may have written it.
    """
    here, there = server.Pipe(duplex=False)
    process = server.Process(target=answer, args=(there, function, arguments))
    starting = asyncio.ensure_future(asyncio.to_thread(process.start))
    try:
        await asyncio.shield(starting)
        there.close()
        line = await read_line(here, process.sentinel)
    finally:
        await starting  # cancelled in the middle of it, the process would run on
        process.kill()
        await asyncio.to_thread(process.join)
        here.close()
    if not line.endswith(b"\n"):
        raise EpisodeFailed("the process of the episode ended without a result")
    result, error = json.loads(line)
    if error:
        raise EpisodeFailed(error)
    return result


async def read_line(connection: Connection, sentinel: int) -> bytes:
    """The line that a process writes, less if it ends before: others that it left may keep the pipe open."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=RESULT_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), connection)

    def stop_reading() -> None:
        loop.remove_reader(sentinel)
        loop.call_later(LAST_SECONDS, transport.close)

    loop.add_reader(sentinel, stop_reading)
    try:
        return await reader.readline()
    except ValueError:
        raise EpisodeFailed(f"the result of the episode has more than {RESULT_BYTES} bytes") from None
    finally:
        loop.remove_reader(sentinel)
        transport.close()


def answer(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call, write the result or what went wrong, and exit, whatever threads are left: Python would wait for them."""
    try:
        said = json.dumps([function(*arguments), ""])
    except BaseException as error:  # noqa: BLE001  # the package may fail in any way, and it is said
        said = json.dumps([None, describe_error(error)])
    try:
        with os.fdopen(connection.fileno(), "wb", closefd=False) as pipe:
            pipe.write(said.encode() + b"\n")
    finally:
        os._exit(0)


def describe_error(error: BaseException) -> str:
    """Its kind and its text; some fail to give one."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001  # of the package
        return type(error).__name__
