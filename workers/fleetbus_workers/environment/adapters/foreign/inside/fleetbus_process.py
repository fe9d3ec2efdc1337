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
    """The result of a function of a module, called in a process of its own. Raises `EpisodeFailed`; cancelled, it ends it."""
    here, there = server.Pipe(duplex=False)
    process = server.Process(target=answer, args=(there, function, arguments))
    await asyncio.to_thread(process.start)
    there.close()
    try:
        await wait_readable(here)
        try:
            result, error = here.recv()
        except EOFError:
            raise EpisodeFailed("the process of the episode ended without a result") from None
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        here.close()
    if error:
        raise EpisodeFailed(error)
    return result


async def wait_readable(connection: Connection) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


def answer(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call and send the result, or what went wrong."""
    try:
        connection.send((function(*arguments), ""))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the package may fail in any way, and it is said
        connection.send((None, f"{type(error).__name__}: {error}"))
