"""The bus in one process, on any anyio backend: for simulations under virtual time, and for tests.

`MemoryServer` is a nats-server's part; each worker gets a `Bus` of its own from `connect`. The same program gives the same
trace. What may go wrong is `Faults`; what an operator may do is `kill`, `restart` and a bus's `disconnect`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.memory_connection import MemoryConnection
from fleetbus.bus.memory_faults import Faults
from fleetbus.bus.memory_server import EPOCH_NS, Files, ServerState
from fleetbus.errors import UserError

__all__ = ["EPOCH_NS", "Faults", "Files", "MemoryBus", "MemoryServer"]

CONNECT_TIMEOUT_SECONDS = 3.0
"""How long a connect waits for a dead server."""


class MemoryServer(ServerState):
    """A server that clients connect to."""

    def __init__(self, *, epoch_ns: int = EPOCH_NS, faults: Faults | None = None) -> None:
        super().__init__(epoch_ns=epoch_ns, faults=faults)
        self._connects = 0

    @asynccontextmanager
    async def connect(self, run: str, *, role: str = "worker", worker: str = "") -> AsyncGenerator[MemoryBus]:
        """A bus for the length of the block; raises `UserError` if the server is down for 3 s."""
        link = MemoryConnection(self._alive)
        self._links[link] = None
        try:
            if not await link.wait(CONNECT_TIMEOUT_SECONDS):
                raise UserError("the in-memory server is down: restart it")
            self._connects += 1
            yield MemoryBus(self, link, run, worker or role, self._connects)
        finally:
            del self._links[link]
