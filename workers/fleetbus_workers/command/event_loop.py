"""The event loop of commands and roles, and the signals that end them."""

import os
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskStatus

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_async(function: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
    """Run an async function to its end: on uvloop, where there is one."""
    return anyio.run(function, *arguments, backend_options={"use_uvloop": os.name != "nt"})


async def call_on_signal(function: Callable[[], None], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    """Call ``function`` at the first SIGINT or SIGTERM; the next one has its usual effect."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            function()
            return
