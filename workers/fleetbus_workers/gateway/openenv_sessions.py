"""The named sessions of an OpenEnv gateway: found again by their name, also after the gateway that created them died.

A name comes with the address (``/sessions/<name>/...``), or is made by ``openenv/session/create``. A session belongs to the
connection that came last; without one it is kept for a while, and then closed.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog

from fleetbus.client.sessions import SessionUnavailable
from fleetbus.errors import BusError
from fleetbus_workers.gateway.openenv_episode import AtCapacity, OpenEnvEpisode

SWEEP_SECONDS = 2.0

log = structlog.get_logger()


class _NamedSession:
    def __init__(self, episode: OpenEnvEpisode) -> None:
        self.episode = episode
        self.connection: anyio.CancelScope | None = None
        self.used_by = 0
        self.close_at = 0.0


class OpenEnvSessions:
    """``max_sessions`` sessions at a time. One is closed ``idle_seconds`` after its last call, or ``resume_seconds`` after its
    connection broke off; what is open when the gateway stops stays open for the next one, or until its worker's idle limit."""

    def __init__(
        self, make: Callable[[str], OpenEnvEpisode], *, max_sessions: int, idle_seconds: float, resume_seconds: float
    ) -> None:
        self._make = make
        self._max_sessions = max_sessions
        self._idle_seconds = idle_seconds
        self._resume_seconds = resume_seconds
        self._sessions: dict[str, _NamedSession] = {}
        self._lookup_lock = anyio.Lock()

    async def run(self) -> None:
        """Close idle sessions until cancelled."""
        while True:
            await anyio.sleep(min(SWEEP_SECONDS, self._resume_seconds, self._idle_seconds))
            now = anyio.current_time()
            async with anyio.create_task_group() as group:
                for name, named in self._sessions.items():
                    if named.connection is None and not named.used_by and named.close_at <= now:
                        group.start_soon(self._end, name, named)

    @asynccontextmanager
    async def use(self, name: str, *, make: bool) -> AsyncIterator[OpenEnvEpisode | None]:
        """The session for the length of one call; None if there is none and none is to be made. Raises `AtCapacity`."""
        named = await self._find(name, make=make)
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
    async def connect(self, name: str, *, make: bool) -> AsyncIterator[OpenEnvEpisode | None]:
        """The session for the length of a connection, which ends when another one comes for the same session."""
        named = await self._find(name, make=make)
        if named is None:
            yield None
            return
        with anyio.CancelScope() as scope:
            if named.connection is not None:
                named.connection.cancel()
                await named.episode.attach()  # what the other connection began may not have been reported to it
            named.connection = scope
            try:
                yield named.episode
            finally:
                if named.connection is scope:
                    named.connection = None
                    named.close_at = anyio.current_time() + self._resume_seconds

    async def close(self, name: str) -> bool:
        """Release the session; False if there is none."""
        named = await self._find(name, make=False)
        return named is not None and await self._end(name, named)

    async def _end(self, name: str, named: _NamedSession) -> bool:
        if self._sessions.get(name) is named:
            del self._sessions[name]
        was_active = named.episode.is_active
        await close_episode(named.episode)
        return was_active

    async def _find(self, name: str, *, make: bool) -> _NamedSession | None:
        async with self._lookup_lock:
            named = self._sessions.get(name)
            if named is not None:
                return named
            episode = self._make(name)
            if not await episode.attach() and not make:
                return None
            if len(self._sessions) >= self._max_sessions:
                raise AtCapacity(f"{self._max_sessions} sessions are open")
            named = self._sessions[name] = _NamedSession(episode)
            named.close_at = anyio.current_time() + self._idle_seconds
            return named


async def close_episode(episode: OpenEnvEpisode) -> None:
    """Close a session, log a failure instead of raising it; bounded by the limit of the call."""
    with anyio.CancelScope(shield=True):
        try:
            await episode.close()
        except (SessionUnavailable, BusError) as error:
            log.warning("session close failed; leaving it to its idle limit", session=episode.name, reason=str(error))
