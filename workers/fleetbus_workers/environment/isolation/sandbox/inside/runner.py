"""The interpreter of one episode: executes pieces of code one after another in one namespace. Standard library alone.

Started inside the isolation as ``runner.py FD LIMITS``. To FD goes one byte with the folders of `SCRATCH`, so that what is in
them can be counted. On FD come frames (length in four bytes, then JSON) with code, or the call of a function of it, and the
seconds that it may take; one frame with the exit code goes back. Standard output and error are files that the worker reads. The
code shares this process and can forge every answer, so no answer is a verdict.
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
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Any, NoReturn

    from fleetbus_workers.environment.isolation.sandbox.inside import confine
else:
    import confine


ONLY_PARSE = 0x400
"""A flag of `compile`: give the syntax tree. The module ast would be loaded for nothing else."""

VALUE_BYTES = 48 << 10
"""The largest value of a call, as JSON."""

ERROR_CHARACTERS = 500
SCRATCH = ("/tmp", "/dev/shm")
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
    folders = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in SCRATCH]
    socket.send_fds(channel, [b"f"], folders)
    for folder in folders:
        os.close(folder)
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
        if "function" in request:
            answer = call(request["function"], request["arguments"], request["seconds"], module.__dict__)
        else:
            if not request.get("hidden"):
                keep_lines(request["code"], f"<code {count}>")
            answer = execute(request["code"], request["seconds"], module.__dict__, f"<code {count}>")
        for stream in (sys.stdout, sys.stderr, *output):
            try:
                stream.flush()
            except Exception:  # noqa: BLE001 - the code may have put anything in their place
                pass  # the code closed or replaced it, or the file is full
        if os.getpid() != own:
            os._exit(answer["exit_code"])  # forked by the code, which has ended here
        channel.sendall(frame(answer | {"number": request["number"]}))


def keep_lines(source: str, name: str) -> None:
    """Show the lines of this code in tracebacks, and to all code that comes after it."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def execute(source: str, seconds: float, scope: dict[str, Any], name: str) -> dict[str, object]:
    """Run one piece of code: ``exit_code``, as a process of its own would have had it, and ``ended``, what stopped it before
    its last statement."""
    try:
        try:
            code = compile(source, name, "exec", dont_inherit=True)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            exec(code, scope)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except SystemExit as leaving:
        ended = "" if is_from_last_statement(leaving, source, name) else "exit"
        if leaving.code is None or isinstance(leaving.code, int):
            return {"exit_code": (leaving.code or 0) & 255, "ended": ended}
        write_error(f"{leaving.code}\n")
        return {"exit_code": 1, "ended": ended}
    except TimeUp:
        write_error(f"TimeoutError: the code took longer than {seconds:g} s and was stopped; its variables are kept\n")
        return {"exit_code": 124, "ended": "time"}
    except BaseException as error:  # noqa: BLE001 - whatever ends the code is its result
        write_error(format_error(error, name))
        return {"exit_code": 1}
    return {"exit_code": 0}


def is_from_last_statement(leaving: SystemExit, source: str, name: str) -> bool:
    """True if the last statement of the code called what exits (``unittest.main`` does), and no function of the code exited."""
    frames = [(trace, trace.tb_frame.f_code) for trace in walk_traceback(leaving)]
    frames = [(trace, code) for trace, code in frames if code.co_filename == name]
    if len(frames) != 1:
        return False
    trace, code = frames[0]
    line, _, column, _ = list(code.co_positions())[trace.tb_lasti // 2]
    last = compile(source, name, "exec", ONLY_PARSE, dont_inherit=True).body[-1]
    return (line or 0, column or 0) >= (last.lineno, last.col_offset)


def walk_traceback(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def call(function: str, arguments: list[Any], seconds: float, scope: dict[str, Any]) -> dict[str, Any]:
    """Call a function that code has defined: its ``value`` as JSON text, or the ``error`` that it raised."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            value = json.dumps(scope[function](*arguments))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if len(value) > VALUE_BYTES:
            raise ValueError(f"the value takes {len(value)} bytes as JSON, more than {VALUE_BYTES}")
    except TimeUp:
        return {"exit_code": 124, "error": f"TimeoutError: the call took longer than {seconds:g} s"}
    except BaseException as error:  # noqa: BLE001 - whatever ends the code is its result
        try:
            return {"exit_code": 1, "error": f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]}
        except Exception:  # noqa: BLE001 - an exception whose text cannot be made
            return {"exit_code": 1, "error": type(error).__name__}
    return {"exit_code": 0, "value": value}


def format_error(error: BaseException, name: str) -> str:
    """The traceback from the code on, without what stands above it here."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 - an exception whose text cannot be made
        return f"{type(error).__name__}\n"


def write_error(text: str) -> None:
    """Write to the code's standard error."""
    try:
        sys.stderr.write(text)
    except Exception:  # noqa: BLE001 - the code may have put anything in its place
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


def frame(message: dict[str, object]) -> bytes:
    """A message as JSON after its length in four bytes."""
    payload = json.dumps(message).encode()
    return struct.pack("!I", len(payload)) + payload


if __name__ == "__main__":
    main()
