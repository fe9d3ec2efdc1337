"""One process of a pool, ``python -m .... pool_process FD FD SPEC``: plays episodes with a user's class.

Frames on the first FD (four bytes of length, then JSON) hold one call each; the answer has its result or its error. When the
other end closes, or the second FD does because the worker died, the process ends at once, even during a call of the class.
"""

import inspect
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Awaitable
from typing import Any

import anyio
import msgspec

from fleetbus.user_code import load_callable
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.python_class.environment import CALLS
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.failure_location import format_traceback, locate_error
from fleetbus_workers.environment.images.observation import encode_image_file
from fleetbus_workers.environment.validation import check_images, validate_return

PARENT_DEATH_SIGNAL = 1
_RETURNS: dict[str, type[Any]] = {"reset": Start, "step": Step, "verify": Verdict, "state": dict}
_HEADER = struct.Struct("!I")


class EnvironmentProcess:
    """The calls of one object after another. Ordinary functions run where no event loop does, as packages that bring a loop of
    their own demand; those of asynchronous classes all run in one, so that they keep what they opened."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._object: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """The answer to one call, or what to await for it; an exception of the class is an answer too."""
        call = request["call"]
        try:
            result = self._call(call, request.get("argument"))
            return self._await(call, result) if inspect.isawaitable(result) else self._encode(call, result)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the class's: the worker's signals are ignored here
            return _describe(error)

    async def _await(self, call: str, result: Awaitable[object]) -> dict[str, Any]:
        try:
            return self._encode(call, await result)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the class's, as above
            return _describe(error)

    def _call(self, name: str, argument: Any) -> Any:
        if name not in CALLS:
            raise ValueError(f"unknown call {name}")
        if name == "close" and self._object is None:
            return None
        if name == "open":
            self._object = self._kind()
        function = getattr(self._object, name)
        if name == "open":
            return function(msgspec.convert(argument, Task))
        return function(msgspec.convert(argument, Action)) if name == "step" else function()

    def _encode(self, call: str, result: Any) -> dict[str, Any]:
        if call == "close":
            self._object = None
        result = self._with_pictures(result, call)
        if kind := _RETURNS.get(call):
            result = validate_return(kind, result, call, self._object)
        return {"result": msgspec.to_builtins(result, enc_hook=_encode_plain)}

    def _with_pictures(self, result: Any, call: str) -> object:
        """Images as files: what the class has of them cannot leave the process."""
        if not isinstance(result, (Start, Step)):
            return result
        check_images(result, call, self._object)
        return msgspec.structs.replace(result, images=tuple(map(encode_image_file, result.images)))


def _describe(error: BaseException) -> dict[str, Any]:
    return {
        "error": str(error),
        "kind": type(error).__name__,
        "failed": isinstance(error, EnvironmentFailed),
        "location": locate_error(error),
        "traceback": format_traceback(error),
    }


def _encode_plain(value: Any) -> object:
    """Numbers of NumPy and torch as Python's own."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot leave the process")


def main() -> None:
    """``pool_process.py FD LIFELINE PATH``: answer requests on the socket FD until it closes."""
    exit_with_parent(int(sys.argv[2]))
    os.dup2(2, 1)  # what the class prints belongs to the worker's log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker drains first
    channel = socket.socket(fileno=int(sys.argv[1]))
    kind = load_callable(f"environment {sys.argv[3]!r}", sys.argv[3])
    server = EnvironmentProcess(kind)
    send(channel, {"ready": True})
    asynchronous = any(inspect.iscoroutinefunction(inspect.unwrap(getattr(kind, call))) for call in CALLS)
    first = None if asynchronous else serve_without_loop(channel, server)
    if asynchronous or first is not None:
        anyio.run(serve, channel, server, first)


def serve_without_loop(channel: socket.socket, server: EnvironmentProcess) -> Awaitable[dict[str, Any]] | None:
    """Answer requests until the socket closes, or until an answer has to be awaited, which is returned."""
    while (request := receive(channel)) is not None:
        answer = server.answer(request)
        if not isinstance(answer, dict):
            return answer
        send(channel, answer)
    return None


async def serve(channel: socket.socket, server: EnvironmentProcess, first: Awaitable[dict[str, Any]] | None) -> None:
    """Answer what was asked first and all that is asked after it, in one event loop."""
    if first is not None:
        send(channel, await first)
    while (request := receive(channel)) is not None:
        answer = server.answer(request)
        send(channel, answer if isinstance(answer, dict) else await answer)


def exit_with_parent(parent_pipe: int) -> None:
    """The lifeline closes when the worker dies; the signal reaches even code that never lets another thread run."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)

    def wait() -> None:
        os.read(parent_pipe, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """One frame: JSON after its length."""
    payload = json.dumps(message).encode()
    channel.sendall(_HEADER.pack(len(payload)) + payload)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next frame; None when the other end has closed."""
    header = read(channel, _HEADER.size)
    payload = read(channel, _HEADER.unpack(header)[0]) if header else b""
    return json.loads(payload) if payload else None


def read(channel: socket.socket, count: int) -> bytes:
    """So many bytes; none when the other end closes before."""
    data = bytearray()
    while len(data) < count:
        chunk = channel.recv(count - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main()
