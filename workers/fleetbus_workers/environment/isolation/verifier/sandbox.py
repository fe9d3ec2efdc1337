"""Runs verifier code in children of a warm process (`zygote`) and makes the calls that the code asks for.

Above it are environments; below it one process per worker and one child per verification. The other end of a child's socket is
its life line: closing it kills the child, so a verdict, a time limit, a cancellation and the death of this very process all
clean up in the same way. Nothing that the code does is an exception here: without a finite number there is no verdict.

The warm process stands in the same isolation as model-written code (`isolation.sandbox`), so that a verification pays
for a fork and not for namespaces: the code has no network, no view of the host's files, no environment variables, none of our
descriptors, no processes of its own, no way to signal others, and limits. Where the machine permits no isolation, what remains
are the limits, a filter of system calls, Landlock against the sight of files (Linux 5.13) and a user of its own under root:
there only verifiers that ship with fleetbus are run, unless the operator says otherwise.
"""

from __future__ import annotations

import math
import signal
import socket
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import structlog
from anyio.abc import Process

from fleetbus_workers.environment.base import FailedVerdict, Verdict
from fleetbus_workers.environment.isolation.sandbox.backends import (
    INSIDE,
    KINDS,
    Isolation,
    IsolationUnavailable,
    Kind,
    build_python_command,
    find_isolation,
    list_readable,
)
from fleetbus_workers.environment.isolation.sandbox.channel import Channel, ChannelBroken
from fleetbus_workers.environment.isolation.verifier.base import HasDatabases, Policy, VerifierLimits, VerifierTools
from fleetbus_workers.environment.isolation.verifier.own import is_own_verifier
from fleetbus_workers.environment.ownership import build_owner_variables

START_SECONDS = 10.0
MAX_STARTS = 3
STOP_SECONDS = 2.0
MAX_IDLE = 8
"""Children that wait for another request."""
_PERMISSION = "or trust the tasks: environment.sandbox = limits runs their verifiers as a process of this user"
_ZYGOTE = Path(__file__).with_name("zygote.py")
_log = structlog.get_logger(__name__)


class VerifierNotStarted(Exception):
    """The warm process died before the child said anything: nothing has happened, and the verification may be repeated."""


class Verifier:
    """Grades episodes; use it inside `run`. ``limits`` hold for each verification.

    ``sandbox`` is about machines where nothing isolates: ``auto`` runs no code but fleetbus's own, ``limits`` runs all with the
    limits that there are, with ``required`` entering `run` raises `IsolationUnavailable`.
    ``reuse_processes``, for episodes that need no protection from each other: a child gives one verdict after the other, as
    verifiers that ship with fleetbus always do, for they run no code of a policy. Children that are kept see no others' code.
    What is not a plain verdict there is verified again in a fresh child, and that verdict counts.
    """

    program: ClassVar[Path] = _ZYGOTE
    """What the warm process runs."""

    def __init__(
        self,
        limits: VerifierLimits | None = None,
        *,
        sandbox: Policy = "auto",
        kinds: Sequence[Kind] = KINDS,
        reuse_processes: bool = False,
    ) -> None:
        self.limits = limits or VerifierLimits()
        self._sandbox = sandbox
        self._kinds = kinds
        self._reuse_processes = reuse_processes
        self._idle: deque[Channel] = deque()
        self._unavailable = ""
        self.hides_files = False
        """Whether the code sees no file of the host; known once the first process is started."""
        self._zygote: _Zygote | None = None
        self._running = False
        self._starting: anyio.Lock | None = None
        self._slots: anyio.CapacityLimiter | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """The lifetime of the processes; the first verification starts them."""
        if self._sandbox == "required":
            await find_isolation(self._kinds)
        self._starting, self._slots = anyio.Lock(), anyio.CapacityLimiter(self.limits.max_concurrent)
        self._running = True
        try:
            yield
        finally:
            self._running = False
            while self._idle:
                self._idle.pop().close()
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                await zygote.stop()

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        """The verdict of ``code`` (see `Grader`). Cancelling it kills its process."""
        if not self._running or self._slots is None:
            raise RuntimeError("enter Verifier.run() before the first verification")
        if self._sandbox == "auto" and not is_own_verifier(code):
            try:
                await find_isolation(self._kinds)
            except IsolationUnavailable as unavailable:
                return Verdict(reward=None, reason=f"verifiers from elsewhere are not run: {unavailable}; {_PERMISSION}")
        request = {"code": code, "final_answer": final_answer, "conversation": conversation}
        async with self._slots:
            if self._reuse_processes or is_own_verifier(code):
                with anyio.move_on_after(self.limits.seconds):
                    verdict = await self._verify_in_used_child(request | {"reuse": True}, tools)
                    if verdict is not None:
                        return verdict
            with anyio.move_on_after(self.limits.seconds):
                return await self._verify(request, tools)
        return Verdict(reward=None, reason=f"no verdict within {self.limits.seconds:g} s")

    async def _verify_in_used_child(self, request: dict[str, object], tools: VerifierTools) -> Verdict | None:
        """The verdict of a child that is kept for the next request if it gives one; None if it does not."""
        channel: Channel | None = None
        try:
            channel = self._idle.pop() if self._idle else await _start_child(await self._ensure_zygote())
            verdict = await answer_calls(channel, request, tools)
            if verdict.reward is None:
                return None
            if self._running and len(self._idle) < MAX_IDLE:
                self._idle.append(channel)
                channel = None
            return verdict
        except (ChannelBroken, VerifierNotStarted):
            return None
        finally:
            if channel is not None:
                channel.close()

    async def _verify(self, request: dict[str, Any], tools: VerifierTools) -> Verdict:
        for _ in range(MAX_STARTS):
            zygote: _Zygote | None = None
            if not self._running:
                return Verdict(reward=None, reason="the verifier was closed before its verdict")
            try:
                zygote = await self._ensure_zygote()
                return await _verify_in_child(zygote, request, tools)
            except ChannelBroken as broken:
                return Verdict(reward=None, reason=f"the verifier's process failed: {broken}")
            except VerifierNotStarted:
                _log.warning("verifier process died; starting a new one")
                await self._discard(zygote)
        return Verdict(reward=None, reason="the process that runs verifiers dies as soon as it is started")

    async def _ensure_zygote(self) -> _Zygote:
        assert self._starting is not None
        async with self._starting:
            zygote = self._zygote
            if not self._running:
                raise VerifierNotStarted
            if zygote is None:
                with anyio.CancelScope(shield=True):  # tens of milliseconds, and others wait for it as well
                    zygote = self._zygote = await _start_zygote(self.limits, await self._isolation(), self.program)
                    self.hides_files = zygote.hides_files
                    if self._unavailable:
                        level = _log.info if zygote.hides_files else _log.warning
                        level(
                            "no isolation is available; verifiers run with limits only",
                            files="hidden" if zygote.hides_files else "SEEN",
                            reason=self._unavailable,
                        )
            assert zygote is not None  # that scope cannot be cancelled from outside
            return zygote

    async def _isolation(self) -> Isolation | None:
        try:
            return await find_isolation(self._kinds)
        except IsolationUnavailable as unavailable:
            self._unavailable = str(unavailable)
            return None

    async def _discard(self, zygote: _Zygote | None) -> None:
        if zygote is not None and self._zygote is zygote:
            self._zygote = None
            await zygote.stop()


async def _verify_in_child(zygote: _Zygote, request: dict[str, object], tools: VerifierTools) -> Verdict:
    channel = await _start_child(zygote)
    try:
        return await answer_calls(channel, request, tools)
    except ChannelBroken as broken:
        # The zygote reports the death of a child; without a report the zygote itself died.
        if channel.silent:
            raise VerifierNotStarted from broken
        raise
    finally:
        channel.close()


async def _start_child(zygote: _Zygote) -> Channel:
    """The socket of a new child; raises `VerifierNotStarted` if the warm process is gone."""
    mine, theirs = socket.socketpair()
    channel = Channel(mine)
    try:
        await zygote.adopt(theirs)
    except BaseException as error:
        channel.close()
        if isinstance(error, OSError):
            raise VerifierNotStarted from error
        raise
    finally:
        theirs.close()
    return channel


async def answer_calls(channel: Channel, request: dict[str, object], tools: VerifierTools) -> Verdict:
    """Hand a request to a child and make the calls that it asks for until its verdict; raises `ChannelBroken`."""
    await channel.send(request)
    while True:
        message = await channel.receive()
        if "call" not in message:
            return _verdict(message)
        await channel.send(await _make_call(message, tools))


class _Zygote:
    """The process and the socket on which it is handed the children's sockets."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self.hides_files = False

    async def adopt(self, child: socket.socket) -> None:
        """Hand over a child's end of its socket; raises `OSError` if the process is gone."""
        while True:
            try:
                socket.send_fds(self._control, [b"v"], [child.fileno()])
                return
            except BlockingIOError:
                await anyio.wait_writable(self._control)

    async def stop(self) -> None:
        """End the process and all children; it goes by itself once its socket is closed."""
        self._control.close()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
            await self._process.aclose()


async def _start_zygote(limits: VerifierLimits, isolation: Isolation | None, program: Path) -> _Zygote:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    resource_limits = {
        "CPU": limits.cpu_seconds,
        "AS": limits.memory_bytes,
        "NOFILE": limits.open_files,
        "FSIZE": 0,
        "NPROC": 0,
        "CORE": 0,
    }
    arguments = [str(theirs.fileno()), msgspec.json.encode(resource_limits).decode()]
    visible = list(dict.fromkeys((INSIDE, _ZYGOTE, program)))
    if isolation is None:
        arguments.append(msgspec.json.encode(list_readable(*visible)).decode())
    command = build_python_command(program, *arguments)
    try:
        process = await anyio.open_process(
            isolation.command(command, visible=visible) if isolation else command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None,
            cwd="/",
            env=build_owner_variables() if isolation else {},
            start_new_session=True,  # Ctrl-C is for the worker, which still wants verdicts while it drains
            pass_fds=(theirs.fileno(),),
        )
    except BaseException:
        mine.close()
        raise
    finally:
        theirs.close()
    zygote = _Zygote(process, mine)
    try:
        with anyio.fail_after(START_SECONDS):
            await anyio.wait_readable(mine)
        reply = mine.recv(1)
        if not reply:
            raise VerifierNotStarted
        zygote.hides_files = reply == b"h"
    except BaseException:
        await zygote.stop()
        raise
    return zygote


async def _make_call(message: dict[str, object], tools: VerifierTools) -> dict[str, object]:
    """Make a call that verifier code asks for, if it is one of those that it may ask for."""
    try:
        match message:
            case {"call": "call_tool", "arguments": [str(name), dict(arguments)]}:
                return {"result": await tools.call_tool(name, arguments)}
            case {"call": "query", "arguments": [str(sql), list(params)]}:
                return {"result": await tools.query(sql, params)}
            case {"call": "database", "arguments": [str(name), str(sql), list(params)]}:
                if not isinstance(tools, HasDatabases):
                    raise LookupError("this environment has no databases with names: use env.query")
                return {"result": await tools.database(name, sql, params)}
    except Exception as error:  # noqa: BLE001 - it goes to the code that asked, which may handle it
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "verifiers may call call_tool(name, arguments), query(sql, params) and db(name).query(sql), nothing else"}


def _verdict(message: dict[str, object]) -> Verdict:
    output = str(message.get("output") or "").strip()
    if "error" in message:
        return FailedVerdict(reward=None, reason=f"{message['error']}{f' (output: {output})' if output else ''}")
    if "died" in message:
        return Verdict(reward=None, reason=f"the verifier's process died ({_exit_reason(message['died'])})")
    reward = message.get("reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        return FailedVerdict(reward=None, reason=f"the verifier returned {reward!r}, not a finite number")
    return Verdict(reward=float(reward), reason=output)


def _exit_reason(code: object) -> str:
    if not isinstance(code, int) or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
