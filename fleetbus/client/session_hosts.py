"""Environment workers that host step-wise sessions, known by their heartbeats."""

from __future__ import annotations

from collections.abc import Collection

import anyio

from fleetbus.bus.base import CallBus
from fleetbus.concurrency.notifier import Notifier
from fleetbus.delivery.heartbeats import LOST_AFTER_SECONDS, follow_heartbeats
from fleetbus.errors import BusClosed
from fleetbus_schemas import Heartbeat, Subjects

MOST_HOSTS = 4096
"""Hosts that are known at a time: those heard of last."""


class SessionHosts:
    """The hosts of sessions, from the moment `run` began. `choose` prefers the one with the largest share of free slots."""

    def __init__(self, bus: CallBus, subjects: Subjects) -> None:
        self._bus = bus
        self._subject = subjects.heartbeat("environment", "*")
        self._hosts: dict[str, tuple[float, Heartbeat]] = {}
        """With when they were heard of last, in that order."""
        self._sent: dict[str, int] = {}
        self._heard = Notifier()
        self._has_ended = False

    async def run(self) -> None:
        """Follow heartbeats until cancelled."""
        try:
            await follow_heartbeats(self._bus, self._subject, self._on_heartbeat)
        finally:
            self._has_ended = True
            self._heard.notify()

    async def choose(self, avoid: Collection[str] = ()) -> str:
        """The best host that is not to be avoided; waits until there is one. The caller's cancel scope is what ends it,
        or `BusClosed` once `run` has ended: no host is heard of any more."""
        while True:
            worker = self._find_best(avoid)
            if worker is not None:
                self._sent[worker] = self._sent.get(worker, 0) + 1  # until its next heartbeat counts it
                return worker
            if self._has_ended:
                raise BusClosed("heartbeats are not followed any more")
            await self._heard.wait()

    def remove(self, worker: str) -> None:
        """Forget a worker until it is heard of again."""
        self._hosts.pop(worker, None)
        self._sent.pop(worker, None)

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        self.remove(beat.worker)
        if beat.session_slots > 0 and not beat.draining:
            self._hosts[beat.worker] = (anyio.current_time(), beat)
            if len(self._hosts) > MOST_HOSTS:
                self.remove(next(iter(self._hosts)))
        self._heard.notify()

    def _forget_silent(self) -> None:
        oldest = anyio.current_time() - LOST_AFTER_SECONDS
        for worker in [worker for worker, (at, _) in self._hosts.items() if at < oldest]:
            self.remove(worker)

    def _find_best(self, avoid: Collection[str]) -> str | None:
        self._forget_silent()
        known = [beat for _, beat in self._hosts.values() if beat.worker not in avoid]
        if not known:
            return None
        return min(known, key=self._compute_load).worker

    def _compute_load(self, beat: Heartbeat) -> tuple[float, str]:
        return (max(beat.sessions, 0) + self._sent.get(beat.worker, 0)) / beat.session_slots, beat.worker
