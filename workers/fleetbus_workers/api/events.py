"""The events of a run, for the program that started it: written by the run's thread, read from any thread or event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Self

import msgspec

from fleetbus.concurrency.wakeup import ThreadWakeup
from fleetbus_schemas import EvaluationFinished, Message, StepTrained, WorkerFailed, WorkerStarted
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.display import PlainDisplay

MAX_EVENTS = 10_000
"""Events that are kept for readers; who reads more slowly misses the oldest."""

EventKind = Literal["message", "worker_started", "worker_failed", "step", "evaluation"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. ``text`` is the line that `fleetbus up` prints for it.

    ``step``: the training step that was trained or evaluated last, of ``steps``. ``metrics``: of a step the learner's (among
    them ``reward``), of an evaluation ``success`` and ``mean_reward``. ``name``: of the worker, or of the evaluation
    (``start``, ``end``, ``end_greedy``).
    """

    kind: EventKind
    text: str
    step: int
    steps: int
    name: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class EventLog:
    """The events of one run, in order. `append` and `close` never block on a reader."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._count = 0
        self._closed = False
        self._wakeups: set[ThreadWakeup] = set()

    def append(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._count += 1
            self._notify()

    def close(self) -> None:
        """The run has ended: readers end after the last event."""
        with self._changed:
            self._closed = True
            self._notify()

    def iterate(self) -> Iterator[Event]:
        """All events from the first one that is kept, as they come; blocks the calling thread between them."""
        position = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._count > position)  # noqa: B023  # called in here only
                position, events = self._read(position)
            if not events:
                return
            yield from events

    def stream(self) -> EventStream:
        """The same for an event loop of any kind."""
        return EventStream(self)

    async def wait_beyond(self, position: int) -> tuple[int, list[Event]]:
        """The events after the first ``position`` ones, as soon as there are any, and their count so far; none at the end."""
        with self._subscribe() as wakeup:
            while True:
                with self._changed:
                    if self._count > position or self._closed:
                        return self._read(position)
                await wakeup.wait()

    async def wait_closed(self) -> None:
        """Return when the run has ended."""
        with self._subscribe() as wakeup:
            while not self._closed:
                await wakeup.wait()

    def _read(self, position: int) -> tuple[int, list[Event]]:
        unread = min(self._count - position, len(self._events))
        return self._count, list(self._events)[-unread:] if unread else []

    def _notify(self) -> None:
        self._changed.notify_all()
        for wakeup in self._wakeups:
            wakeup.notify()

    @contextmanager
    def _subscribe(self) -> Iterator[ThreadWakeup]:
        wakeup = ThreadWakeup()
        with self._changed:
            self._wakeups.add(wakeup)
        try:
            yield wakeup
        finally:
            with self._changed:
                self._wakeups.discard(wakeup)
            wakeup.close()


class EventStream:
    """An asynchronous iterator over the events of a log. It holds nothing between events, so it may be left at any of them."""

    def __init__(self, events: EventLog) -> None:
        self._log = events
        self._position = 0
        self._unread: deque[Event] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if not self._unread:
            self._position, events = await self._log.wait_beyond(self._position)
            self._unread.extend(events)
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.popleft()


class EventDisplay(PlainDisplay):
    """Turns what `fleetbus up` would print into events."""

    def __init__(self, progress: Progress, emit: Callable[[Event], None]) -> None:
        super().__init__(progress, self._emit_line)
        self._emit = emit
        self._message: Message | None = None

    def show_message(self, message: Message) -> None:
        self._message = message
        super().show_message(message)
        self._message = None

    def _emit_line(self, text: str) -> None:
        message, self._message = self._message, None  # a second line of one message is a remark on it
        kind, name, metrics = _describe_message(message)
        progress = self._progress
        self._emit(Event(kind=kind, text=text, step=progress.step, steps=progress.steps, name=name, metrics=metrics))


def _describe_message(message: Message | None) -> tuple[EventKind, str, dict[str, float]]:
    match message:
        case StepTrained():
            return "step", "", message.metrics
        case EvaluationFinished():
            return "evaluation", message.name, {"success": message.success, "mean_reward": message.mean_reward}
        case WorkerStarted():
            return "worker_started", message.worker, {}
        case WorkerFailed():
            return "worker_failed", message.worker, {}
    return "message", "", {}
