"""An agent in isolation, and its only way out: a port on the loopback inside, forwarded to a socket of the worker.

Started inside as ``agent.py FD PIPE``. FD has JSON: ``command``, ``variables``, ``folder``, ``port``, ``socket`` (the path of
the worker's), ``users`` (of the agent and of what forwards, where this is root) and ``limits``. Ends as the agent does, or once
the other side of PIPE is closed, with all that it started. Standard library alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from fleetbus_workers.environment.isolation.sandbox.inside import confine
else:
    import confine

CONNECTIONS = 128
"""Connections at a time; a further one takes the place of one that is idle, or waits for its turn."""

IDLE_SECONDS = 15.0
"""Since the last bytes of an answer. Clients keep connections that they may not use again, such as one for each episode, until
the worker closes them; in an answer that has not ended the worker says something more often."""

LOOK_SECONDS = 1.0

CHUNK_BYTES = 1 << 16
CANNOT_EXECUTE = 127


def main() -> NoReturn:
    """Start the agent below this process, forward until it ends."""
    pipe = int(sys.argv[2])
    os.set_inheritable(pipe, False)
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        settings = json.load(file)
    listener = socket.create_server(("127.0.0.1", settings["port"]), backlog=CONNECTIONS)
    agent = os.fork()
    if agent == 0:
        listener.close()
        execute(settings)
    confine.confine({"NOFILE": 4 * CONNECTIONS, "CORE": 0}, user=settings["users"][1], loopback=True)
    threading.Thread(target=end_with, args=(pipe,), daemon=True).start()
    threading.Thread(target=exit_like, args=(agent,), daemon=True).start()
    asyncio.run(forward(listener, settings["socket"]))
    raise AssertionError("forwarding has no end of its own")


def execute(settings: dict[str, Any]) -> NoReturn:
    """Become the agent, without any right."""
    os.setsid()
    confine.confine(settings["limits"], user=settings["users"][0], loopback=True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and so would what it executes
    command = settings["command"]
    try:
        os.chdir(settings["folder"])
        os.execvpe(command[0], command, settings["variables"])
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be executed: {error}\n")
        sys.stderr.flush()
    os._exit(CANNOT_EXECUTE)


def end_with(pipe: int) -> NoReturn:
    """End everything once the other side is closed: nothing else ends a sandbox in whose making the worker died."""
    os.read(pipe, 1)
    os._exit(128 + signal.SIGKILL)


def exit_like(agent: int) -> NoReturn:
    """Collect the dead until the agent is among them, then end everything as it did."""
    while True:
        process, status = os.wait()
        if process == agent:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


class Link:
    """A connection that is forwarded. ``answered``: the last bytes went to the agent."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._answered = False
        self._spoke = time.monotonic()

    def note(self, *, answered: bool) -> None:
        self._answered, self._spoke = answered, time.monotonic()

    def close_if_idle(self) -> None:
        has_idled = self._answered and time.monotonic() - self._spoke >= IDLE_SECONDS
        if has_idled and not self._writer.transport.get_write_buffer_size():  # else the agent has not read all of the answer
            self._writer.close()


async def forward(listener: socket.socket, path: str) -> None:
    """Connect every connection with a socket of the worker's."""
    places = asyncio.Semaphore(CONNECTIONS)
    links: set[Link] = set()

    async def take_place() -> None:
        if not places.locked():
            await places.acquire()
            return
        acquiring = asyncio.create_task(places.acquire())  # one for all looks: its turn is that of the first
        while not acquiring.done():
            for link in links:
                link.close_if_idle()
            await asyncio.wait([acquiring], timeout=LOOK_SECONDS)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await take_place()
        link = Link(writer)
        links.add(link)
        try:
            above, out = await asyncio.open_unix_connection(path)
            asked = pump(reader, out, lambda: link.note(answered=False))
            answered = pump(above, writer, lambda: link.note(answered=True))
            await asyncio.wait([asyncio.create_task(asked), asyncio.create_task(answered)])
        except OSError:
            writer.close()
        finally:
            links.discard(link)
            places.release()

    server = await asyncio.start_server(connect, sock=listener)
    await server.serve_forever()


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, note: Callable[[], None]) -> None:
    """Copy until one side is gone, which closes the other."""
    try:
        while data := await source.read(CHUNK_BYTES):
            note()
            target.write(data)
            await target.drain()
    except OSError:
        pass  # one side is gone
    finally:
        target.close()


if __name__ == "__main__":
    main()
