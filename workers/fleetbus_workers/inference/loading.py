"""Loads packages and models in threads, one at a time in a process: an evaluation with seats has several engines in one.

transformers imports its parts when they are first named, and builds models with torch's default device changed for the whole
process: where two threads do so at once, one finds half a package, or weights that hold nothing.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")

_LOADING = threading.Lock()


async def load_alone(function: Callable[..., T], *arguments: object) -> T:
    """Call it in a thread while no other engine of the process loads. Cancelled, it does not wait for the call."""

    def call() -> T:
        with _LOADING:
            return function(*arguments)

    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
