"""One interpreter in isolation: code goes in, standard output, standard error and an exit code come out; variables stay.

Above it is an environment, one session per episode; below it `inside/runner.py`. Output goes to files in memory that only this
worker reads, so that a flood of it costs nothing here. All that the code does - exit, crash, hang, exhaust its memory - is a
result; the next code then gets a new interpreter and a notice. Only an interpreter that cannot be started is an error.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import anyio
import msgspec
from anyio.abc import Process

from fleetbus_workers.environment.isolation.sandbox.backends import INSIDE, Isolation, build_python_command
from fleetbus_workers.environment.isolation.sandbox.channel import Channel, ChannelBroken, ChannelEnded
from fleetbus_workers.environment.isolation.sandbox.inside.confine import FIRST_USER
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch
from fleetbus_workers.environment.ownership import build_owner_variables

Ended = Literal["", "time", "memory", "exit"]
_ENDS: dict[str, Literal["time", "exit"]] = {"time": "time", "exit": "exit"}

START_SECONDS = 30.0
STOP_SECONDS = 5.0
GRACE_SECONDS = 2.0
"""How much longer than its time code may take to be stopped from within, before its interpreter is killed."""

ANSWER_BYTES, MAX_ANSWERS = 64 << 10, 64
"""Largest answer of an interpreter, and the most that are read for the right one: the code may send some of its own."""

MAX_DEPTH = 64
"""Levels of lists and objects in the value of a call."""

TIME_UP, KILLED = 124, 137
_numbers = itertools.count()


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one sandbox. ``seconds`` is wall-clock time of one piece of code, ``cpu_seconds`` of a process's whole
    life; ``memory_bytes`` bounds each process's address space, ``total_memory_bytes`` what all of them use; ``output_bytes`` is
    how much of each stream is returned."""

    seconds: float = 30.0
    cpu_seconds: int = 300
    memory_bytes: int = 1 << 30
    total_memory_bytes: int = 2 << 30
    processes: int = 32
    open_files: int = 128
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    output_bytes: int = 32 << 10


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a piece of code. ``ended`` says what ended its interpreter, if anything did; ``fresh`` is true for the
    first code of an interpreter that replaces one that was ended. ``code_ended`` says what ended the code before its last
    statement while its interpreter continues."""

    stdout: str
    stderr: str
    exit_code: int
    ended: Ended = ""
    fresh: bool = False
    code_ended: Literal["", "time", "exit"] = ""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call of a function of the code: a ``value`` (plain JSON, None with an ``error``), all claims of that
    code. ``ended`` says what ended the interpreter, if anything did."""

    value: Any = None
    error: str = ""
    ended: Ended = ""


class SandboxFailed(Exception):
    """The interpreter could not be started, which is no fault of the code."""


class SandboxSession:
    """One episode's sandbox. `run` calls must not overlap; `close` in every case.

    ``writable``: folders of this machine by where they are inside, owned by ``user`` (see `allocate_user`) where this is root.
    """

    def __init__(
        self,
        isolation: Isolation,
        limits: SandboxLimits,
        watch: MemoryWatch,
        *,
        user: int | None = None,
        writable: Mapping[str, str] | None = None,
    ) -> None:
        self._isolation = isolation
        self._user = user
        self._writable = writable
        self._limits = limits
        self._watch = watch
        self._interpreter: _Interpreter | None = None
        self._lost = False
        self._ended: Ended = ""
        self.busy = False
        self.memory_limit = limits.total_memory_bytes

    @property
    def process_id(self) -> int | None:
        return self._interpreter.process.pid if self._interpreter else None

    @property
    def scratch(self) -> Sequence[int]:
        return self._interpreter.scratch if self._interpreter else ()

    def end(self, reason: Ended) -> None:
        """Kill the interpreter; the code that runs learns the reason."""
        if self._interpreter is not None:
            self._ended = reason
            self._interpreter.kill()

    async def open(self) -> None:
        """Start the interpreter. Raises `SandboxFailed`."""
        if self._interpreter is None:
            self._ended = ""
            self._interpreter = await _start(self._isolation, self._limits, self._user, self._writable)
            self._watch.add(self)

    async def run(self, code: str, *, seconds: float | None = None, hidden: bool = False) -> ExecutionResult:
        """Execute code, for ``seconds`` at most; the source of ``hidden`` code is not kept for tracebacks, where later code
        could read it. Raises `SandboxFailed` if there is no interpreter to be had."""
        if self._interpreter is not None and (self._ended or self._interpreter.process.returncode is not None):
            await self._stop()  # it was ended since the last code
            self._lost = True
        await self.open()
        assert self._interpreter is not None
        self._interpreter.discard_output()
        fresh, self._lost = self._lost, False
        answer, ended, (stdout, stderr) = await self._request(self._interpreter, {"code": code, "hidden": hidden}, seconds)
        return ExecutionResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=answer["exit_code"],
            ended=ended,
            fresh=fresh,
            code_ended=_ENDS.get(str(answer.get("ended")), ""),
        )

    async def call(self, function: str, arguments: Sequence[Any], *, seconds: float | None = None) -> CallResult:
        """Call a function that code of this session has defined; its interpreter is not started anew for that."""
        if self._interpreter is None:
            return CallResult(error="the interpreter has ended", ended=self._ended or "exit")
        request = {"function": function, "arguments": list(arguments)}
        answer, ended, _ = await self._request(self._interpreter, request, seconds)
        if ended:
            return CallResult(error=f"the interpreter ended ({ended}, exit code {answer['exit_code']})", ended=ended)
        if "value" not in answer:
            return CallResult(error=str(answer.get("error") or "no value"))
        try:
            value = json.loads(answer["value"])
        except (TypeError, ValueError, RecursionError) as error:
            return CallResult(error=f"the value is no JSON: {error}"[:ANSWER_BYTES])
        if _is_deeper(value, MAX_DEPTH):
            return CallResult(error=f"the value has more than {MAX_DEPTH} levels")
        return CallResult(value=value)

    async def _request(
        self, interpreter: _Interpreter, request: dict[str, Any], seconds: float | None
    ) -> tuple[dict[str, Any], Ended, tuple[str, str]]:
        """The answer, what ended the interpreter (which then is stopped), and what it wrote to its output and error."""
        limit = min(seconds or self._limits.seconds, self._limits.seconds)
        self.busy = True
        try:
            answer, ended = await self._wait_for_answer(interpreter, request | {"seconds": limit}, limit)
        except BaseException:
            await self._stop()  # the next code must not get this one's answer
            self._lost = True
            raise
        finally:
            self.busy = False
        output = interpreter.output(self._limits.output_bytes)
        if ended:
            await self._stop()
            self._lost = True
        return answer, ended, output

    async def _wait_for_answer(
        self, interpreter: _Interpreter, request: dict[str, object], seconds: float
    ) -> tuple[dict[str, Any], Ended]:
        try:
            with anyio.move_on_after(seconds + GRACE_SECONDS):
                number = next(_numbers)
                await interpreter.channel.send(request | {"number": number})
                for _ in range(MAX_ANSWERS):
                    answer = await interpreter.channel.receive()
                    if answer.get("number") == number and isinstance(answer.get("exit_code"), int):
                        return answer, ""
                raise ChannelBroken("too many answers")
        except ChannelEnded:
            if self._ended:
                return {"exit_code": KILLED}, self._ended
            return {"exit_code": await interpreter.exit_code()}, "exit"
        except ChannelBroken:
            interpreter.kill()  # the code talks on a channel that is not its own
            return {"exit_code": KILLED}, "exit"
        return {"exit_code": TIME_UP}, "time"

    async def close(self) -> bool:
        """End the interpreter and all that it started; whether all of it is known to have ended."""
        return await self._stop()

    async def _stop(self) -> bool:
        interpreter, self._interpreter = self._interpreter, None
        self._watch.discard(self)
        return interpreter is None or await interpreter.stop()


class _Interpreter:
    """A running process and what belongs to it."""

    def __init__(self, process: Process, channel: Channel, streams: tuple[int, int]) -> None:
        self.process = process
        self.channel = channel
        self._streams = streams
        self.scratch: list[int] = []
        self._first = -1

    def find_first_process(self) -> None:
        """Hold on to the first process of the new process namespace, the only child of the one that was started."""
        try:
            with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
                self._first = os.pidfd_open(int(file.read().split()[0]))
        except (OSError, IndexError, ValueError):
            self._first = -1  # it is gone already, or the system cannot tell

    def discard_output(self) -> None:
        for stream in self._streams:
            os.ftruncate(stream, 0)

    def output(self, limit: int) -> tuple[str, str]:
        stdout, stderr = (_read_ends(stream, limit) for stream in self._streams)
        return stdout, stderr

    async def exit_code(self) -> int:
        """The exit code, shortly after its channel did; it is killed if it continues without one."""
        with anyio.move_on_after(STOP_SECONDS):
            code = await self.process.wait()
            return code if code >= 0 else 128 - code
        self.kill()
        return KILLED

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def stop(self) -> bool:
        """True if the first process inside has ended, which it does after all others."""
        self.channel.close()
        self.kill()
        ended = False
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(STOP_SECONDS):
                await self.process.wait()
                if self._first >= 0:
                    await anyio.wait_readable(self._first)
                    ended = True
            await self.process.aclose()
        for descriptor in (*self._streams, *self.scratch, *([self._first] if self._first >= 0 else [])):
            os.close(descriptor)
        self.scratch, self._first = [], -1
        return ended


def allocate_user() -> int:
    """A user id that belongs to nobody, and to no other sandbox of this worker."""
    return FIRST_USER + (os.getpid() & 0xFFFF) * 4096 + next(_numbers) % 4096


async def _start(
    isolation: Isolation, limits: SandboxLimits, user: int | None, writable: Mapping[str, str] | None
) -> _Interpreter:
    if sys.platform != "linux":
        raise SandboxFailed("the sandbox needs Linux")
    settings: dict[str, object] = {
        "user": allocate_user() if user is None else user,
        "limits": {
            "CPU": limits.cpu_seconds,
            "AS": limits.memory_bytes,
            "NPROC": limits.processes,
            "NOFILE": limits.open_files,
            "FSIZE": limits.file_bytes,
            "CORE": 0,
        },
    }
    mine, theirs = socket.socketpair()
    channel = Channel(mine, limit=ANSWER_BYTES)
    streams = (_output_file("stdout"), _output_file("stderr"))
    program = build_python_command(INSIDE / "runner.py", str(theirs.fileno()), msgspec.json.encode(settings).decode())
    command = isolation.command(program, visible=[INSIDE], tools=True, scratch_bytes=limits.scratch_bytes, writable=writable)
    try:
        process = await anyio.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            cwd="/",
            env=build_owner_variables(),
            start_new_session=True,
            pass_fds=(theirs.fileno(),),
        )
    except BaseException as error:
        channel.close()
        for stream in streams:
            os.close(stream)
        if isinstance(error, OSError):
            raise SandboxFailed(str(error)) from error
        raise
    finally:
        theirs.close()
    interpreter = _Interpreter(process, channel, streams)
    try:
        with anyio.fail_after(START_SECONDS):
            interpreter.scratch = await channel.receive_descriptors(2)
            await channel.receive()
            interpreter.find_first_process()
    except (ChannelBroken, TimeoutError) as error:
        reason = interpreter.output(2000)[1].strip().splitlines() or [str(error) or f"not ready within {START_SECONDS:g} s"]
        await interpreter.stop()
        raise SandboxFailed(f"the sandbox's interpreter does not start: {reason[-1]}") from error
    except BaseException:
        await interpreter.stop()
        raise
    return interpreter


def _is_deeper(value: object, levels: int) -> bool:
    """True if lists and objects stand in each other on more levels than so many."""
    layer = [value]
    for _ in range(levels + 1):
        containers = [each for each in layer if isinstance(each, dict | list)]
        if not containers:
            return False
        layer = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return True


def _output_file(name: str) -> int:
    """A file in memory to which every writer appends."""
    import fcntl

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def _read_ends(descriptor: int, limit: int) -> str:
    """All of a file as text, or its beginning and its end with what is missing in between."""
    size = os.fstat(descriptor).st_size
    if size <= limit:
        return os.pread(descriptor, limit, 0).decode("utf-8", "replace")
    half = limit // 2
    begin, end = os.pread(descriptor, half, 0), os.pread(descriptor, half, size - half)
    cut = f"\n[... {size - 2 * half} bytes cut ...]\n"
    return begin.decode("utf-8", "replace") + cut + end.decode("utf-8", "replace")
