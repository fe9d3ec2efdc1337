"""Runs a program on trio so that one seed gives one order of events, in any process. The only file that knows trio's inside.

What it relies on, checked at import time against the trio that is installed (0.30 to 0.35 have it):

* `trio._core._run._r`, the generator that shuffles each batch of runnable tasks, can be seeded;
* `_ALLOW_DETERMINISTIC_SCHEDULING` sorts a batch by age before it is shuffled, so that no set's order matters;
* `MockClock(autojump_threshold=0)` moves time only when every task waits.

A thread would end at an instant of its own, so what workers give to one runs in the event loop.

Garbage collection is off during a run: a collected async generator would wake a task at an instant of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import trio
import trio._core._run as internals
import trio.testing

T = TypeVar("T")

for _name in ("_r", "_ALLOW_DETERMINISTIC_SCHEDULING"):
    if not hasattr(internals, _name):
        raise ImportError(f"trio {trio.__version__} has no {_name}: simulations need a release between 0.30 and 0.35")


def run_deterministically(function: Callable[[], Awaitable[T]], *, seed: int) -> T:
    """Run ``function`` to its end under virtual time that begins at 0; everything it raises comes out."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    with _deterministic(seed):
        return anyio.run(function, backend="trio", backend_options={"clock": clock})


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Seed the scheduler, and leave it as it was."""
    state, flag, collecting = internals._r.getstate(), internals._ALLOW_DETERMINISTIC_SCHEDULING, gc.isenabled()
    run_in_thread = anyio.to_thread.run_sync
    internals._r.seed(seed)
    internals._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    anyio.to_thread.run_sync = _run_inline  # type: ignore[assignment]
    gc.disable()
    try:
        yield
    finally:
        anyio.to_thread.run_sync = run_in_thread
        internals._r.setstate(state)
        internals._ALLOW_DETERMINISTIC_SCHEDULING = flag  # type: ignore[misc]
        if collecting:
            gc.enable()


async def _run_inline(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    return function(*arguments)
