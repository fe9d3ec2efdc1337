"""Coding environments of one worker: which isolation they use, and the watch over the memory of all of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakSet

from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.coding.environment import CodingEnvironment
from fleetbus_workers.environment.isolation.sandbox import SandboxLimits, SandboxSession
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch


def build(context: AdapterContext) -> Factory:
    """Environments whose sandboxes end with the worker. Raises `IsolationUnavailable` where code of a model could do harm."""
    isolation = require_isolation()
    watch = MemoryWatch()
    sessions: WeakSet[SandboxSession] = WeakSet()
    limits = SandboxLimits(seconds=context.call_seconds, output_bytes=max(2000, context.observation_bytes // 2))

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
        return CodingEnvironment(make_session, **context.grading_arguments("compact"))

    return Factory(make, run)
