"""A user's class in worker processes: each plays one episode at a time, so blocking code blocks and a crash takes one episode.

Processes start when they are needed, up to a limit; an episode beyond it waits in `open`. A process is kept for the next
episode after a clean close, and killed after anything else: a crash, a call that was given up, a close that failed. Devices
belong to processes: the n-th process has the n-th device, and round again, and its successor inherits it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import Process

from fleetbus.python_process import build_module_command
from fleetbus.user_code import load_callable
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.python_class.environment import assign_device, check_class, parse_device_names
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage
from fleetbus_workers.environment.isolation.sandbox.channel import Channel, ChannelBroken
from fleetbus_workers.environment.own_images import ImageStoringFactory

S = TypeVar("S", Start, Step)

START_SECONDS = 60.0
STOP_SECONDS = 5.0
MAX_ANSWER_BYTES = 16 << 20
"""Of one call of the class; its observations may have images in them."""


def build(context: AdapterContext) -> Factory:
    """Environments of the class at pool:MODULE:CLASS, in processes; images are stored. Raises `UserError`."""
    path, settings = context.rest, context.settings.environment
    kind = load_callable(f"environment {context.spec!r}", path)
    check_class(context.spec, kind)
    pool = ProcessPool(
        path,
        processes=settings.processes or settings.slots,
        devices=parse_device_names(settings.devices),
        replayable=bool(getattr(kind, "replayable", False)),
    )
    return Factory(ImageStoringFactory(pool, context.store_image), pool.run)


class ProcessPool:
    """The processes of one worker; use it inside `run`. ``processes`` bounds how many there are."""

    def __init__(self, spec: str, *, processes: int, devices: Sequence[str] = (), replayable: bool = False) -> None:
        self.replayable = replayable
        self._spec = spec
        self._slots = [_ProcessSlot(devices[number % len(devices)] if devices else "") for number in range(processes)]
        self._free: list[_ProcessSlot] = []
        self._limiter: anyio.Semaphore | None = None

    def __call__(self) -> PooledEnvironment:
        return PooledEnvironment(self)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """The lifetime of the processes; all are ended at its end."""
        self._free = [*self._slots]
        self._limiter = anyio.Semaphore(len(self._slots))
        try:
            yield
        finally:
            self._limiter = None
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for slot in self._slots:
                        tasks.start_soon(slot.stop)

    async def acquire(self) -> _ProcessSlot:
        """A place with a running process. Raises `EnvironmentFailed` if none can be started."""
        if self._limiter is None:
            raise RuntimeError("enter run() before the first episode")
        await self._limiter.acquire()
        slot = next((slot for slot in self._free if slot.is_running), self._free[0])
        self._free.remove(slot)
        try:
            if not slot.is_running:
                await slot.start(self._spec)
        except BaseException:
            self.release(slot)
            raise
        return slot

    def release(self, slot: _ProcessSlot) -> None:
        self._free.append(slot)
        if self._limiter is not None:
            self._limiter.release()


class PooledEnvironment:
    """One episode, played in a process of the pool."""

    def __init__(self, pool: ProcessPool) -> None:
        self.replayable = pool.replayable
        self._pool = pool
        self._slot: _ProcessSlot | None = None
        self._broken = False

    async def open(self, task: Task) -> None:
        self._slot = await self._pool.acquire()
        await self._call("open", assign_device(task, self._slot.device))

    async def reset(self) -> Start:
        return _with_pictures(msgspec.convert(await self._call("reset"), Start))

    async def step(self, action: Action) -> Step:
        return _with_pictures(msgspec.convert(await self._call("step", action), Step))

    async def state(self) -> dict[str, Any]:
        return msgspec.convert(await self._call("state"), dict[str, Any])

    async def verify(self) -> Verdict:
        return msgspec.convert(await self._call("verify"), Verdict)

    async def close(self) -> None:
        """Close the episode and free its place; what does not end by itself is killed."""
        slot = self._slot
        if slot is None:
            return
        closed = False
        try:
            if not self._broken:
                await self._call("close")
                closed = True
        finally:
            self._slot = None
            if not closed:
                await slot.stop()
            self._pool.release(slot)

    async def _call(self, call: str, argument: Any = None) -> Any:
        if self._slot is None or self._broken:
            raise EnvironmentFailed("the environment's process is gone")
        self._broken = True  # until the answer is there: a call that is given up leaves its process in the middle of it
        try:
            answer = await self._slot.ask({"call": call, "argument": msgspec.to_builtins(argument)})
        except ChannelBroken as error:
            raise EnvironmentFailed(f"{call}: the environment's process died ({await self._slot.describe_exit()})") from error
        self._broken = False
        if "error" not in answer:
            return answer.get("result")
        reason = str(answer["error"]) if answer.get("failed") else f"{answer.get('kind')}: {answer['error']}"
        location, traceback = str(answer.get("location", "")), str(answer.get("traceback", ""))
        raise EnvironmentFailed(reason, location=location, remote_traceback=traceback)


def _with_pictures(observed: S) -> S:
    """Images as they came from the process."""
    return msgspec.structs.replace(observed, images=msgspec.convert(observed.images, tuple[EncodedImage, ...]))


class _ProcessSlot:
    """Room for one process, and the one that is in it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._parent_pipe = -1

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._channel is not None
        await self._channel.send(request)
        return await self._channel.receive()

    async def describe_exit(self) -> str:
        """The end of the process, in words."""
        if self._process is None:
            return "unknown"
        with anyio.move_on_after(STOP_SECONDS):
            await self._process.wait()
        code = self._process.returncode
        if code is None:
            return "it closed its channel"
        try:
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            return f"signal {-code}"

    async def start(self, spec: str) -> None:
        await self.stop()  # remains of a previous process
        mine, theirs = socket.socketpair()
        parent_pipe, self._parent_pipe = os.pipe()
        self._channel = Channel(mine, limit=MAX_ANSWER_BYTES)
        try:
            self._process = await anyio.open_process(
                build_module_command(
                    "fleetbus_workers.environment.adapters.python_class.pool_process",
                    str(theirs.fileno()),
                    str(parent_pipe),
                    spec,
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None,
                start_new_session=True,
                pass_fds=(theirs.fileno(), parent_pipe),
            )
            theirs.close()
            with anyio.fail_after(START_SECONDS):
                await self._channel.receive()
        except (ChannelBroken, TimeoutError, OSError) as error:
            reason = await self.describe_exit() if isinstance(error, ChannelBroken) else str(error) or "not ready in time"
            await self.stop()
            raise EnvironmentFailed(f"the environment's process does not start: {reason}") from error
        except BaseException:
            await self.stop()
            raise
        finally:
            theirs.close()
            os.close(parent_pipe)

    async def stop(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        parent_pipe, self._parent_pipe = self._parent_pipe, -1
        if channel is not None:
            channel.close()
        if parent_pipe >= 0:
            os.close(parent_pipe)
        if process is not None:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(STOP_SECONDS):
                    await process.wait()
                await process.aclose()
