"""Which server answers: least loaded first, an episode's own server while it has room, none that is not ready.

A server is ready when it is healthy and its weights are the wanted version. Health is asked in the background; a server that
comes back, or was started again behind our back, is given the wanted weights before it is asked for a token.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import anyio
import structlog

from fleetbus_workers.inference.openai.server import Server, ServerTrouble

CHECK_SECONDS = 2.0
MAX_REMEMBERED = 4096
"""Episodes whose server is remembered, the longest unused forgotten first."""

log = structlog.get_logger()


class Pool:
    """``slots`` answers at a time are spread over ``servers``. ``restore(server)`` brings a server that was away to the state
    that is wanted; it raises `ServerTrouble`."""

    def __init__(self, servers: Sequence[Server], *, slots: int, restore: Callable[[Server], Awaitable[None]]) -> None:
        self.servers = tuple(servers)
        self.wanted: int | None = None
        """The version that answers come from; None: whatever they have."""
        self._room = math.ceil(slots / len(servers))
        self._restore = restore
        self._homes: OrderedDict[str, Server] = OrderedDict()
        self._changed = anyio.Event()
        self.stayed = 0
        """Turns that went to the server that has their episode's keys and values; `moved`: those that could not."""
        self.moved = 0

    def ready(self) -> list[Server]:
        """The servers that may be asked now."""
        return [
            server
            for server in self.servers
            if server.state.healthy and (self.wanted is None or server.state.version == self.wanted)
        ]

    async def choose(self, episode: str) -> Server:
        """The server for an episode's turn; waits while there is none. The caller's scope limits the wait."""
        while not (ready := self.ready()):
            await self._changed.wait()
        least = min(ready, key=lambda server: server.state.in_flight)
        home = self._homes.pop(episode, None)
        has_room = home in ready and home is not None and home.state.in_flight < self._room
        chosen = home if home is not None and has_room else least
        if home is not None:
            self.stayed += chosen is home
            self.moved += chosen is not home
        self._homes[episode] = chosen
        if len(self._homes) > MAX_REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def forget(self, episode: str) -> None:
        self._homes.pop(episode, None)

    def suspect(self, server: Server, reason: str) -> None:
        """Not asked again before it has shown that it lives."""
        if server.state.healthy:
            log.warning("server left out", url=server.url, reason=reason)
        server.state.healthy = False
        server.state.reason = reason

    def announce(self) -> None:
        """Something changed: whoever waits looks again."""
        self._changed.set()
        self._changed = anyio.Event()

    def reasons(self) -> str:
        """Why the servers that are not ready are not, in one line."""
        return "; ".join(server.state.reason for server in self.servers if not server.state.healthy)

    async def watch(self, busy: anyio.Lock) -> None:
        """Ask after every server's health, for ever; ``busy`` is held while weights are swapped."""
        while True:
            async with busy, anyio.create_task_group() as group:
                for server in self.servers:
                    group.start_soon(self._check, server)
            await anyio.sleep(CHECK_SECONDS)

    async def _check(self, server: Server) -> None:
        state = server.state
        try:
            await server.is_alive()
            if state.takes_weights and self.wanted is not None and await server.weight_label() != label(self.wanted):
                state.version = None
            if not state.healthy or (self.wanted is not None and state.version != self.wanted):
                await self._restore(server)
                log.info("server is ready", url=server.url)
        except ServerTrouble as trouble:
            self.suspect(server, str(trouble))
            return
        state.healthy = True
        self.announce()


def label(version: int) -> str:
    """What a server calls the weights of a version."""
    return f"fleetbus-{version}"
