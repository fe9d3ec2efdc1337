"""One simulated process: a worker with its own wire, which may crash, be stopped for a while, be cut off, or drain.

A crash cuts the connection before anything is cancelled, so that no last word, not even a shielded one, leaves the process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import anyio

from fleetbus.bus.memory import MemoryServer
from tests.simulation.observer import Observer
from tests.simulation.platform.bus import BusObserver, Gate, SimulatedBus
from tests.simulation.platform.network_faults import SeededNetworkFaults

RUN = "sim"

Ending = Literal["", "finished", "crashed", "failed", "aborted"]


class Process:
    """``open_environments`` and ``generating`` are what it really holds, whatever it says in its heartbeats;
    ``rejected_at`` is when its engine rejected weights, None once it was given weights again."""

    def __init__(self, role: str, name: str, slots: int, observer: Observer, *, session_slots: int = 0) -> None:
        self.role = role
        self.name = name
        self.policy = ""
        self.slots = slots
        self.session_slots = session_slots
        self.drain = anyio.Event()
        self.gate = Gate()
        self.inbox = Gate()
        self.ended = anyio.Event()
        self.ending: Ending = ""
        self.error: Exception | None = None
        self.drained_at = 0.0
        self.open_environments = 0
        self.open_sessions = 0
        self.generating = 0
        self.rejected_at: float | None = None
        self._observer = observer
        self._scope = anyio.CancelScope()
        self._wire: SimulatedBus | None = None

    @property
    def is_alive(self) -> bool:
        return not self.ending

    async def live(
        self,
        server: MemoryServer,
        network_faults: SeededNetworkFaults,
        witness: BusObserver,
        work: Callable[[SimulatedBus], Awaitable[None]],
        bucket: dict[str, bytes] | None = None,
    ) -> None:
        """From connecting to the end, whatever the end is."""
        self._observer.trace("start", self.name)
        try:
            with self._scope:
                async with server.connect(RUN, role=self.role, worker=self.name) as bus:
                    self._wire = SimulatedBus(
                        bus, self.name, self.gate, self.inbox, network_faults, self._observer, witness, bucket
                    )
                    await work(self._wire)
            self._end("aborted" if self._scope.cancelled_caught else "finished")
        except (Exception, BaseExceptionGroup) as raised:  # the end of a process: a traceback and exit code 1 in a shell
            error = (
                raised if isinstance(raised, Exception) else raised.subgroup(Exception)
            )  # the simulation ends at that moment
            if error is None:
                raise
            self.error = error
            self._end("failed")
        finally:
            self.ended.set()

    def crash(self) -> None:
        """As SIGKILL."""
        if self.is_alive:
            self._observer.disturb("crash", self.name)
            self._end("crashed")
            self.cut()
            self.gate.open()
            self.inbox.open()
            self._scope.cancel()

    def abort(self) -> None:
        """End it with the simulation."""
        self.cut()
        self.gate.open()
        self._scope.cancel()

    async def pause(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after ``seconds``."""
        self._observer.disturb("pause", self.name, seconds=seconds)
        self.gate.close()
        await anyio.sleep(seconds)
        self.gate.open()

    async def fall_behind(self, seconds: float) -> None:
        """It sends, and receives nothing for ``seconds``; then the server ends its connection, as with a slow consumer."""
        self._observer.disturb("slow_consumer", self.name, seconds=seconds)
        self.inbox.close()
        await anyio.sleep(seconds)
        self.cut()
        self.inbox.open()
        if self._wire is not None and self.ending != "crashed":
            self._wire.reconnect()

    async def cut_off(self, seconds: float) -> None:
        """Its network is down for ``seconds``."""
        self._observer.disturb("cut", self.name, seconds=seconds)
        self.cut()
        await anyio.sleep(seconds)
        if self._wire is not None and self.ending != "crashed":
            self._wire.reconnect()

    def cut(self) -> None:
        if self._wire is not None:
            self._wire.disconnect()

    def stop(self) -> None:
        """As SIGTERM."""
        if not self.drain.is_set():
            self.drained_at = anyio.current_time()
            self._observer.trace("drain", self.name)
            self.drain.set()

    def hold(self, *, environments: int = 0, generations: int = 0, sessions: int = 0) -> None:
        """Something was opened (1) or closed (-1) in this process; it never holds more than its slots."""
        self.open_environments += environments
        self.generating += generations
        held = max(self.open_environments, self.generating)
        self._observer.require(held <= self.slots, "in_flight <= slots", f"{self.name}: {held} of {self.slots}")
        self.open_sessions += sessions
        right = self.open_sessions <= self.session_slots
        self._observer.require(right, "sessions <= session_slots", f"{self.name}: {self.open_sessions}")

    def _end(self, ending: Ending) -> None:
        if not self.ending:
            self.ending = ending
            self._observer.trace("end", self.name, ending, type(self.error).__name__ if self.error else "")
