"""The interpreter of one episode: executes pieces of code one after another in one namespace. Standard library alone.

Started inside the isolation as ``runner.py FD LIMITS``. On FD come frames (length in four bytes, then JSON) with code and the
seconds it may take; one frame with the exit code goes back. Standard output and error are files that the worker reads.
"""

from __future__ import annotations

import builtins
import json
import linecache
import os
import signal
import socket
import struct
import sys
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from fleetbus_workers.environment.isolation.sandbox.inside import confine
else:
    import confine


NICENESS = 10
"""Code of models yields to the worker that has to answer for it."""


class TimeUp(BaseException):
    """Raised in the code when its seconds are over."""


def main() -> NoReturn:
    """``runner.py FD SETTINGS``: give up every right, then execute the code that arrives on the socket FD until it closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    del sys.argv[1:], sys.path[0], sys.modules["confine"]
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGALRM, on_alarm)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    os.nice(NICENESS)
    confine.confine(settings["limits"], user=settings["user"])
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    output = sys.stdout, sys.stderr
    channel.sendall(frame({"ready": True}))
    count, own = 0, os.getpid()
    while True:
        request = receive(channel)
        count += 1
        sys.stdout, sys.stderr = output
        code = execute(request["code"], request["seconds"], module.__dict__, f"<code {count}>")
        for stream in (sys.stdout, sys.stderr, *output):
            try:
                stream.flush()
            except Exception:
                pass  # the code closed or replaced it, or the file is full
        if os.getpid() != own:
            os._exit(code)  # forked by the code, which has ended here
        channel.sendall(frame({"exit_code": code, "number": request["number"]}))


def execute(source: str, seconds: float, scope: dict[str, Any], name: str) -> int:
    """Run one piece of code; its exit code, as a process of its own would have had it."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        try:
            code = compile(source, name, "exec", dont_inherit=True)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            exec(code, scope)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except SystemExit as leaving:
        if leaving.code is None:
            return 0
        if isinstance(leaving.code, int):
            return leaving.code & 255
        write_error(f"{leaving.code}\n")
        return 1
    except TimeUp:
        write_error(f"TimeoutError: the code took longer than {seconds:g} s and was stopped; its variables are kept\n")
        return 124
    except BaseException as error:
        write_error(format_error(error, name))
        return 1
    return 0


def format_error(error: BaseException, name: str) -> str:
    """The traceback from the code on, without what stands above it here."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # an exception whose text cannot be made
        return f"{type(error).__name__}\n"


def write_error(text: str) -> None:
    """Write to the code's standard error."""
    try:
        sys.stderr.write(text)
    except Exception:
        pass  # the code closed or replaced it


def on_alarm(*_: object) -> None:
    """The handler of the timer that bounds the code."""
    raise TimeUp


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next request; exits when the other end has closed."""
    (length,) = struct.unpack("!I", read(channel, 4))
    request: dict[str, Any] = json.loads(read(channel, length))
    return request


def read(channel: socket.socket, count: int) -> bytes:
    """So many bytes; exits when the other end has closed."""
    data = b""
    while len(data) < count:
        chunk = channel.recv(count - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def frame(message: dict[str, Any]) -> bytes:
    """A message as JSON after its length in four bytes."""
    payload = json.dumps(message).encode()
    return struct.pack("!I", len(payload)) + payload


if __name__ == "__main__":
    main()
