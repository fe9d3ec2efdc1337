"""Chooses the server that answers: least loaded first, an episode's own server while it has room, none that is not ready.

A server is ready when it is healthy and its weights are the wanted version. Health is asked in the background; a server that
comes back, or was restarted by others, is given the wanted weights before it is asked for a token.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import anyio
import structlog

from fleetbus_workers.inference.openai.model_server import ModelServer, ServerFailed

CHECK_SECONDS = 2.0
MAX_REMEMBERED = 4096
"""Episodes whose server is remembered, the longest unused forgotten first."""

log = structlog.get_logger()


class ServerPool:
    """``slots`` answers at a time are spread over ``servers``. ``restore(server)`` brings a server that was away to the state
    that is wanted; it raises `ServerFailed`."""

    def __init__(
        self, servers: Sequence[ModelServer], *, slots: int, restore: Callable[[ModelServer], Awaitable[None]]
    ) -> None:
        self.servers = tuple(servers)
        self.wanted: int | None = None
        """The version that answers come from; None: any that they have."""
        self._slots_per_server = math.ceil(slots / len(servers))
        self._restore = restore
        self._preferred_servers: OrderedDict[str, ModelServer] = OrderedDict()
        self._changed = anyio.Event()
        self.sticky_turns = 0
        """Turns that went to the server that has their episode's keys and values; `moved_turns`: those that could not."""
        self.moved_turns = 0

    def list_ready(self) -> list[ModelServer]:
        """The servers that may be asked now."""
        return [
            server
            for server in self.servers
            if server.state.healthy and (self.wanted is None or server.state.version == self.wanted)
        ]

    async def choose(self, episode: str) -> ModelServer:
        """The server for an episode's turn; waits while there is none. The caller's scope limits the wait."""
        while not (ready := self.list_ready()):
            await self._changed.wait()
        least = min(ready, key=lambda server: server.state.in_flight)
        preferred = self._preferred_servers.pop(episode, None)
        has_room = preferred in ready and preferred is not None and preferred.state.in_flight < self._slots_per_server
        chosen = preferred if preferred is not None and has_room else least
        if preferred is not None:
            self.sticky_turns += chosen is preferred
            self.moved_turns += chosen is not preferred
        self._preferred_servers[episode] = chosen
        if len(self._preferred_servers) > MAX_REMEMBERED:
            self._preferred_servers.popitem(last=False)
        return chosen

    def forget(self, episode: str) -> None:
        self._preferred_servers.pop(episode, None)

    def mark_suspect(self, server: ModelServer, reason: str) -> None:
        """Exclude a server until its health check passes."""
        if server.state.healthy:
            log.warning("server failed; excluding it until it is healthy", url=server.url, reason=reason)
        server.state.healthy = False
        server.state.reason = reason

    def notify(self) -> None:
        """Wake the tasks that wait for a ready server."""
        self._changed.set()
        self._changed = anyio.Event()

    def describe_failures(self) -> str:
        """The reasons why servers are not ready, in one line."""
        return "; ".join(server.state.reason for server in self.servers if not server.state.healthy)

    async def watch(self, busy: anyio.Lock) -> None:
        """Check every server's health and load periodically, until cancelled; ``busy`` is held while weights are swapped."""
        while True:
            async with busy, anyio.create_task_group() as group:
                for server in self.servers:
                    group.start_soon(self._check_server, server)
            async with anyio.create_task_group() as group:
                for server in self.list_ready():
                    if server.dialect.returns_tokens:
                        group.start_soon(server.update_load)
            await anyio.sleep(CHECK_SECONDS)

    async def _check_server(self, server: ModelServer) -> None:
        state = server.state
        try:
            await server.check_health()
            if (
                state.takes_weights
                and self.wanted is not None
                and await server.fetch_weight_label() != build_weight_label(self.wanted)
            ):
                state.version = None
            if not state.healthy or (self.wanted is not None and state.version != self.wanted):
                await self._restore(server)
                log.info("server ready", url=server.url)
        except ServerFailed as failed:
            self.mark_suspect(server, str(failed))
            return
        state.healthy = True
        self.notify()


def build_weight_label(version: int) -> str:
    """The server's name for the weights of a version."""
    return f"fleetbus-{version}"
