"""One worker of a test's deployment, which can be killed, cut off and drained."""

from __future__ import annotations

import anyio

from fleetbus.bus.base import Bus
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus_schemas import WorkerRole
from fleetbus_workers.environment.episode.stages import find_root_cause


class Member:
    """One worker. ``error`` is what ended it."""

    def __init__(self, role: WorkerRole, name: str) -> None:
        self.role = role
        self.name = name
        self.drain = anyio.Event()
        self.ended = anyio.Event()
        self.error: Exception | None = None
        self.is_expected_to_fail = False
        self.bus: Bus | None = None
        self.scope = anyio.CancelScope()

    def kill(self) -> None:
        """As SIGKILL: nothing that it says gets out, not even a goodbye."""
        self.cut()
        self.scope.cancel()

    def cut(self) -> None:
        """Nothing gets out and nothing gets in, and it does not know: a cut network, or SIGSTOP as others see it."""
        if isinstance(self.bus, MemoryBus):  # a bus on NATS ends with its scope
            self.bus.disconnect()

    def mend(self) -> None:
        assert isinstance(self.bus, MemoryBus)
        self.bus.reconnect()

    def failure(self) -> BaseException | None:
        """What ended it, as the test expects it."""
        self.is_expected_to_fail = True
        return find_root_cause(self.error) if self.error is not None else None
