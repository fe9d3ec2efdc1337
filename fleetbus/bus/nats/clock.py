"""The server's clock as seen from here: the local monotonic clock plus an offset measured by question and answer.

The error is at most half the round trip; of the recent measurements the one with the shortest trip counts. Never steps back by
little. What is off by more than a measurement can be is another clock, which is followed at once in either direction: what the
local wall clock said before the server was heard, a server whose clock was set, a machine that slept.
"""

from __future__ import annotations

import time
from collections import deque

MAX_SAMPLES = 8

SET_NS = 1_000_000_000
"""Clocks that were not set drift apart by less between two measurements."""


class ServerClock:
    """Starts from the local wall clock until the server has been heard."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._samples: deque[tuple[int, int]] = deque(maxlen=MAX_SAMPLES)
        self._last_ns = 0

    def now_ns(self) -> int:
        """Unix nanoseconds."""
        self._last_ns = max(self._last_ns, time.monotonic_ns() + self._offset_ns)
        return self._last_ns

    def forget(self) -> None:
        """Another server may answer from now on; the next measurement replaces all earlier ones."""
        self._samples.clear()

    def learn(self, sent_ns: int, received_ns: int, server_ns: int) -> None:
        """The server said ``server_ns`` between two instants of `time.monotonic_ns`."""
        trip_ns, offset_ns = received_ns - sent_ns, server_ns - (sent_ns + received_ns) // 2
        if abs(offset_ns - self._offset_ns) > SET_NS + trip_ns:
            self._samples.clear()
            self._last_ns = 0
        self._samples.append((trip_ns, offset_ns))
        self._offset_ns = min(self._samples)[1]
