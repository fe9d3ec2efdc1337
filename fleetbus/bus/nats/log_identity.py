"""Tells whether a log is still the one that was read and written before the connection was down.

A server that lost power, or was set up again, may hold another log of the same name, which may be as long again. What is
written at lost positions would be passed over without a word, and what was lost nobody would store again: so readers compare
before they go on. Above it are readers; below it the API and direct gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.doubts import add_doubts
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.direct import get_entry
from fleetbus.bus.nats.publisher import NOTHING_STORED, Stored

MAX_SHORT_CHECKS = 6
"""So often in a row a log that ends before what is known of it is looked at again: a new leader may still be taking over."""

LAG_PAUSES_SECONDS = (0.0, 0.05, 0.25)
"""Before a replica is asked for an entry."""


class LogReplaced(Exception):
    """The log is another one, or has lost entries; the words say what tells so."""


class LogIdentity:
    """Knowledge of one stream. ``created`` is when it was made, as far as this connection knows; ``get_last_stored`` gives
    what this connection stored there last; ``looks_up``: this user may read entries by their position."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        *,
        created: str = "",
        looks_up: bool = False,
        get_last_stored: Callable[[], Stored] = lambda: NOTHING_STORED,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._created = created
        self._looks_up = looks_up
        self._get_last_stored = get_last_stored
        self._doubted: list[Stored] = []
        self._short_checks = 0

    def doubt(self) -> None:
        """The log may have lost entries: `check` asks for what is stored by now, however much is stored until then
        (docs/decisions/0198-what-is-known-before-a-reader-looks.md)."""
        self._doubted = add_doubts(self._doubted, [self._get_last_stored()])

    async def check(self, last_read: int, last_time_ns: int) -> bool:
        """True if the log has what was read last, at ``last_read`` (0: nothing), and what was stored last; False if it ends
        before, and should be asked again. Raises `LogReplaced` and what the API raises."""
        self.doubt()
        stored, self._doubted = self._doubted, []  # a doubt that comes meanwhile is another one
        is_there = False
        try:
            is_there = await self._compare(stored, last_read, last_time_ns)
        finally:
            if not is_there:
                self._doubted = add_doubts(stored, self._doubted)
        return is_there

    async def _compare(self, doubted: Sequence[Stored], last_read: int, last_time_ns: int) -> bool:
        info = await self._connection.api.ask(f"STREAM.INFO.{self._stream}")
        self._created = self._created or info["created"]
        if info["created"] != self._created:
            raise LogReplaced(f"stream {self._stream} was created again at {info['created']}")
        if not self._is_long_enough(info["state"]["last_seq"], last_read, max(stored.sequence for stored in doubted)):
            return False
        if self._looks_up:
            has_replicas = bool((info.get("cluster") or {}).get("replicas"))
            found = await self._look_up(last_read, has_replicas)
            if found is not None and found.time_ns != last_time_ns:
                raise LogReplaced(f"entry {last_read} of stream {self._stream} is not the one that was read before")
            for stored in doubted:
                found = await self._look_up(stored.sequence, has_replicas)
                if found is not None and (found.subject, found.payload) != (stored.subject, stored.payload):
                    raise LogReplaced(f"entry {stored.sequence} of stream {self._stream} is not the one that was stored there")
        return True

    def _is_long_enough(self, last: int, last_read: int, last_stored: int) -> bool:
        if last >= max(last_read, last_stored):
            self._short_checks = 0
            return True
        self._short_checks += 1
        if self._short_checks > MAX_SHORT_CHECKS:
            what = f"{last_read} was read" if last < last_read else f"{last_stored} was stored"
            raise LogReplaced(f"stream {self._stream} ends at {last}, and {what} before")
        return False

    async def _look_up(self, sequence: int, has_replicas: bool) -> StreamEntry | None:
        """The entry at a position (0: none is known), on whichever subject; None also if it was trimmed."""
        for pause in LAG_PAUSES_SECONDS if has_replicas else (0.0,):
            await anyio.sleep(pause)
            if sequence and (found := await get_entry(self._connection, self._stream, sequence)) is not None:
                return found
        return None
