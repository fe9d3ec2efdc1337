"""The named sessions of an OpenEnv gateway: found again by whoever knows the name, also after the gateway that began them died.

A name comes with the address (``/sessions/<name>/...``), or is made by ``openenv/session/create``. A session belongs to the
connection that came last; without one it is kept for a while, and then closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog

from fleetbus.client.sessions import SessionUnavailable
from fleetbus.errors import BusError
from fleetbus_workers.gateway.openenv_episode import AtCapacity, OpenEnvEpisode

SWEEP_SECONDS = 2.0

log = structlog.get_logger()


class _Named:
    def __init__(self, episode: OpenEnvEpisode) -> None:
        self.episode = episode
        self.connection: anyio.CancelScope | None = None
        self.used_by = 0
        self.close_at = 0.0


class OpenEnvSessions:
    """``most`` sessions at a time. One is closed ``idle_seconds`` after its last call, or ``resume_seconds`` after its
    connection broke off; what is open when the gateway stops stays open for the next one, or until its worker's idle limit."""

    def __init__(self, make: Callable[[str], OpenEnvEpisode], *, most: int, idle_seconds: float, resume_seconds: float) -> None:
        self._make = make
        self._most = most
        self._idle_seconds = idle_seconds
        self._resume_seconds = resume_seconds
        self._known: dict[str, _Named] = {}
        self._finding = anyio.Lock()

    async def run(self) -> None:
        """For ever: close what nobody uses."""
        while True:
            await anyio.sleep(min(SWEEP_SECONDS, self._resume_seconds, self._idle_seconds))
            now = anyio.current_time()
            async with anyio.create_task_group() as group:
                for name, named in self._known.items():
                    if named.connection is None and not named.used_by and named.close_at <= now:
                        group.start_soon(self._end, name, named)

    @asynccontextmanager
    async def use(self, name: str, *, make: bool) -> AsyncIterator[OpenEnvEpisode | None]:
        """The session for the length of one call; None if there is none and none is to be made. Raises `AtCapacity`."""
        named = await self._found(name, make=make)
        if named is None:
            yield None
            return
        named.used_by += 1
        try:
            yield named.episode
        finally:
            named.used_by -= 1
            named.close_at = anyio.current_time() + self._idle_seconds

    @asynccontextmanager
    async def connected(self, name: str, *, make: bool) -> AsyncIterator[OpenEnvEpisode | None]:
        """The session for the length of a connection, which ends when another one comes for the same session."""
        named = await self._found(name, make=make)
        if named is None:
            yield None
            return
        with anyio.CancelScope() as scope:
            if named.connection is not None:
                named.connection.cancel()
                await named.episode.attach()  # what the other connection began may not have been told to it
            named.connection = scope
            try:
                yield named.episode
            finally:
                if named.connection is scope:
                    named.connection = None
                    named.close_at = anyio.current_time() + self._resume_seconds

    async def close(self, name: str) -> bool:
        """Release the session; False if there is none."""
        named = await self._found(name, make=False)
        return named is not None and await self._end(name, named)

    async def _end(self, name: str, named: _Named) -> bool:
        if self._known.get(name) is named:
            del self._known[name]
        was = named.episode.begun
        await closed(named.episode)
        return was

    async def _found(self, name: str, *, make: bool) -> _Named | None:
        async with self._finding:
            named = self._known.get(name)
            if named is not None:
                return named
            episode = self._make(name)
            if not await episode.attach() and not make:
                return None
            if len(self._known) >= self._most:
                raise AtCapacity(f"{self._most} sessions are open")
            named = self._known[name] = _Named(episode)
            named.close_at = anyio.current_time() + self._idle_seconds
            return named


async def closed(episode: OpenEnvEpisode) -> None:
    """Close a session whose closing is nobody's concern any more; bounded by the limit of the call."""
    with anyio.CancelScope(shield=True):
        try:
            await episode.close()
        except (SessionUnavailable, BusError) as error:
            log.warning("session not closed", session=episode.name, reason=str(error))
