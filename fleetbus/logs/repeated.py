"""Says a warning that comes again and again once, and then how often it came, at growing intervals.

While a server is away, everything that waits for it retries and warns: 64 episodes for 18 minutes are 2,000 lines that say the
same. Above it is the set-up of logs. Counted are warnings that say that something is retried, by their event alone
(docs/decisions/0163-retries-are-said-once.md).
"""

import logging
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec
import structlog

FIRST_INTERVAL_SECONDS = 30.0
LONGEST_INTERVAL_SECONDS = 600.0

QUIET_SECONDS = 120.0
"""After this long without the warning, the next one is said at once: it is about something new."""

_RETRIES = "; retrying"


class _Repetition(msgspec.Struct):
    said_at: float
    seen_at: float
    interval: float = FIRST_INTERVAL_SECONDS
    unsaid: int = 0


class RepeatedWarnings:
    """Decides which warnings are said; usable from any thread. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._repetitions: dict[str, _Repetition] = {}

    def count(self, event: str) -> int | None:
        """Number of times that the warning came unsaid since it was said last; None if it is not to be said now."""
        now = self._clock()
        with self._lock:
            known = self._repetitions.get(event)
            if known is None or now - known.seen_at > QUIET_SECONDS:
                self._repetitions[event] = _Repetition(now, now)
                return known.unsaid if known is not None else 0
            known.seen_at = now
            if now - known.said_at < known.interval:
                known.unsaid += 1
                return None
            unsaid, known.unsaid, known.said_at = known.unsaid, 0, now
            known.interval = min(2 * known.interval, LONGEST_INTERVAL_SECONDS)
            return unsaid

    def process(self, _logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor."""
        if method == "warning" and _RETRIES in str(event["event"]):
            unsaid = self.count(event["event"])
            if unsaid is None:
                raise structlog.DropEvent
            if unsaid:
                event["repeated"] = unsaid
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """The same for `logging`, where the connection to NATS warns: all of its warnings are about what it does again."""
        if record.levelno != logging.WARNING or not record.name.startswith("fleetbus."):
            return True
        unsaid = self.count(record.msg)
        if unsaid:
            record.msg = f"{record.msg} ({unsaid} more of these before)"
        return unsaid is not None
