"""Threads and randomness, which workers need from the process besides the bus. Replaced as a whole in simulation."""

import functools
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import msgspec


async def run_in_thread(function: Callable[..., object], *args: object, **options: Any) -> Any:
    """Run blocking work in a worker thread; cancellation waits for it to end."""
    return await anyio.to_thread.run_sync(functools.partial(function, *args, **options))


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """``offload`` runs blocking work outside the event loop; ``nonce`` creates a unique name."""

    offload: Callable[..., Awaitable[Any]] = run_in_thread
    nonce: Callable[[], str] = lambda: secrets.token_hex(16)
