"""Coding environments of one worker: which isolation they use, and the watch over the memory of all of them."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from weakref import WeakSet

from fleetbus_workers.environment.adapters.coding.environment import CodingEnvironment
from fleetbus_workers.environment.isolation.sandbox import SandboxLimits, SandboxSession
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch
from fleetbus_workers.environment.isolation.verifier.base import Grader


def build_coding_factory(
    *, grader: Grader, prompt: str, observation_bytes: int, seconds: float
) -> tuple[Callable[[], CodingEnvironment], Callable[[], AbstractAsyncContextManager[None]]]:
    """A maker of environments, and the context around all of them. ``seconds`` bounds each piece of code.

    Raises `IsolationUnavailable` where code of a model could do harm.
    """
    isolation = require_isolation()
    watch = MemoryWatch()
    sessions: WeakSet[SandboxSession] = WeakSet()
    limits = SandboxLimits(seconds=seconds, output_bytes=max(2000, observation_bytes // 2))

    @asynccontextmanager
    async def run() -> AsyncIterator[None]:
        try:
            async with watch.run():
                yield
        finally:
            for session in tuple(sessions):
                await session.close()  # its environment should have; this is the safeguard

    def make_session() -> SandboxSession:
        session = SandboxSession(isolation, limits, watch)
        sessions.add(session)
        return session

    def make() -> CodingEnvironment:
        return CodingEnvironment(make_session, grader=grader, prompt=prompt, observation_bytes=observation_bytes)

    return make, run
