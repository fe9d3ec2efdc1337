"""Core messages in memory: who is subscribed to what, requests that wait for answers, listeners that drop.

Above it are the workers; below it the server's switchboard. Nothing here is stored, and nothing here runs by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from fleetbus.bus.base import Request
from fleetbus.bus.memory_connection import MemoryConnection
from fleetbus.bus.memory_subjects import SubjectIndex
from fleetbus.concurrency.notifier import Notifier

T = TypeVar("T")
Respond = Callable[[bytes], None]
OnMessage = Callable[[str, bytes, Respond | None], None]


class SubscriptionTable:
    """The subscriptions by subject."""

    def __init__(self) -> None:
        self._subscriptions: SubjectIndex[tuple[MemoryConnection, OnMessage]] = SubjectIndex()

    def subscribe(self, key: object, subject: str, link: MemoryConnection, on_message: OnMessage) -> None:
        self._subscriptions.add(subject, key, (link, on_message))

    def unsubscribe(self, key: object, subject: str) -> None:
        self._subscriptions.remove(subject, key)

    def send(self, subject: str, payload: bytes, respond: Respond | None = None) -> int:
        """Give a message to all who are subscribed and connected; returns how many they are."""
        receivers = [heard for link, heard in self._subscriptions.find(subject) if link.up]
        for heard in receivers:
            heard(subject, payload, respond)
        return len(receivers)


class PendingAnswer:
    """The caller's side of one request: the first answer counts."""

    def __init__(self, link: MemoryConnection) -> None:
        self._link = link
        self._arrived = anyio.Event()
        self.payload: bytes | None = None

    def respond(self, payload: bytes) -> None:
        if self.payload is None and self._link.up:
            self.payload = payload
            self._arrived.set()

    async def wait(self, timeout: float) -> None:
        with anyio.move_on_after(timeout):
            await self._arrived.wait()


class MemoryRequest:
    """See `fleetbus.bus.base.Request`."""

    __slots__ = ("_link", "_respond", "payload", "subject")

    def __init__(self, subject: str, payload: bytes, respond: Respond | None, link: MemoryConnection) -> None:
        self.subject = subject
        self.payload = payload
        self._respond = respond
        self._link = link

    async def respond(self, payload: bytes) -> None:
        if self._respond is not None and self._link.up:
            self._respond(payload)


class _ReceiveQueue(Generic[T]):
    """Messages that came and were not received yet; beyond ``limit`` the oldest is dropped."""

    def __init__(self, limit: int) -> None:
        self._waiting: deque[T] = deque(maxlen=limit)
        self._wake = Notifier()

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) == self._waiting.maxlen

    async def receive(self) -> T:
        await anyio.lowlevel.checkpoint()
        while not self._waiting:
            await self._wake.wait()
        return self._waiting.popleft()

    def _put(self, item: T) -> None:
        self._waiting.append(item)
        self._wake.notify()


class MemoryRequestServer(_ReceiveQueue[Request]):
    """See `fleetbus.bus.base.RequestServer`."""

    def __init__(self, link: MemoryConnection, limit: int) -> None:
        super().__init__(limit)
        self._link = link

    def on_message(self, subject: str, payload: bytes, respond: Respond | None) -> None:
        if not self._is_full:
            self._put(MemoryRequest(subject, payload, respond, self._link))


class MemoryListener(_ReceiveQueue[tuple[str, bytes]]):
    """See `fleetbus.bus.base.Listener`."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.dropped = 0

    def on_message(self, subject: str, payload: bytes, respond: Respond | None) -> None:
        self.dropped += self._is_full
        self._put((subject, payload))
