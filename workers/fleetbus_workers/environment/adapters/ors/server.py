"""A server of the Open Reward Standard as all episodes of a worker share it: its environments, and the sessions that live.

A server ends a session that it has not heard of for a while (fifteen minutes; hosted ones two), so each is pinged every ten
seconds, however long the policy thinks. Above it is `environment`, below it `client`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import structlog

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.ors.address import Address, build_path, choose_environment
from fleetbus_workers.environment.adapters.ors.client import OrsClient, Refused, SessionGone, ToolRaised, Unreachable
from fleetbus_workers.environment.adapters.ors.messages import Block, CallResult, Listing
from fleetbus_workers.environment.base import EnvironmentFailed

PING_SECONDS = 10.0
SETUP_SECONDS = 600.0
"""The longest wait for a session to be set up; the limits of the stages `open` and `reset` are usually shorter."""
DELETE_SECONDS = 10.0
EXISTS = "already exists"
"""How a server refuses to make a session of this name a second time."""

_log = structlog.get_logger(__name__)


class OrsSession:
    """One episode's session; made by `OrsServer.open_session`. Calls raise an `EnvironmentFailed`."""

    def __init__(self, client: OrsClient, environment: str, sid: str) -> None:
        self._client = client
        self._environment = environment
        self.id = sid
        self._lost: SessionGone | None = None
        self._is_created = False

    async def create(self, split: str, index: int) -> None:
        """Have the environment made, for a task. Repeating is harmless: a name stands for one session."""
        body = {"env_name": self._environment, "split": split, "index": index}
        try:
            await self._client.ask("POST", "/create", dict[str, Any], sid=self.id, body=body, seconds=SETUP_SECONDS)
        except Refused as error:
            if error.status != 400 or EXISTS not in str(error):  # the answer to an earlier try got lost
                raise
        self._is_created = True

    async def read_prompt(self) -> tuple[Block, ...]:
        """The task's prompt; waits until the environment is set up."""
        path = build_path(self._environment, "prompt")
        return await self._client.ask("GET", path, tuple[Block, ...], sid=self.id, seconds=SETUP_SECONDS)

    async def list_tools(self) -> Listing:
        """The tools of this task, or of the environment where a server lists no others."""
        try:
            path = build_path(self._environment, "task_tools")
            return await self._client.ask("GET", path, Listing, sid=self.id, seconds=SETUP_SECONDS)
        except SessionGone as gone:  # so says a server that has no such page, too
            try:
                return await self._client.ask("GET", build_path(self._environment, "tools"), Listing)
            except Refused:
                raise gone from None

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> CallResult:
        """Have a tool called, once."""
        if self._lost is not None:
            raise SessionGone(str(self._lost))
        result = await self._client.call(self.id, self._environment, name, arguments, seconds)
        if not result.ok and result.reason == "name_collision":  # no fault of the policy's
            raise ToolRaised(f"the environment cannot run {name!r}: {result.error}")
        return result

    async def ping(self) -> None:
        """Say that the session is needed; one that is gone is remembered, any other failure is the next call's to find. One
        that is not created yet is unknown to the server, which means nothing."""
        if not self._is_created or self._lost is not None:
            return
        try:
            await self._client.ask("POST", "/ping", dict[str, Any], sid=self.id, body={}, seconds=PING_SECONDS, tries=1)
        except SessionGone as gone:
            self._lost = gone
        except EnvironmentFailed as error:
            _log.debug("ors ping failed; trying again", server=self._client.url, reason=str(error))

    async def delete(self) -> None:
        """Have the environment torn down and the name forgotten; never raises for what is gone."""
        for path in ("/delete", "/delete_session"):
            try:
                await self._client.ask("POST", path, dict[str, Any], sid=self.id, body={}, seconds=DELETE_SECONDS, tries=2)
            except SessionGone:
                pass
            except EnvironmentFailed as error:
                _log.warning(
                    "ors session delete failed; leaving it to expire", server=self._client.url, path=path, reason=str(error)
                )
                if isinstance(error, Unreachable):
                    return


class OrsServer:
    """The server at an address; `run` is entered around all sessions."""

    def __init__(self, address: Address, *, ping_seconds: float = PING_SECONDS) -> None:
        self.address = address
        self._ping_seconds = ping_seconds
        self._client = OrsClient(address.url)
        self._environment = ""
        self._naming = anyio.Lock()
        self.sessions: set[OrsSession] = set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with self._client.run(), open_first_error_task_group() as tasks:
            tasks.start_soon(self._keep_alive)
            yield
            tasks.cancel_scope.cancel()

    async def name_session(self) -> OrsSession:
        """A session that holds nothing yet; it counts as open until `close_session`. Raises an `EnvironmentFailed`."""
        environment = await self._find_environment()
        session = OrsSession(self._client, environment, await self._client.create_session())
        self.sessions.add(session)
        return session

    async def close_session(self, session: OrsSession) -> None:
        """Delete it; a second time does nothing."""
        if session in self.sessions:
            self.sessions.discard(session)
            await session.delete()

    async def delete_session(self, sid: str) -> None:
        """Delete a session that another worker had."""
        await OrsSession(self._client, self._environment, sid).delete()

    async def _find_environment(self) -> str:
        """The environment's name, asked for once."""
        async with self._naming:
            if not self._environment:
                listed = await self._client.ask("GET", "/list_environments", list[str])
                try:
                    self._environment = choose_environment(self.address, listed)
                except UserError as error:
                    raise EnvironmentFailed(str(error)) from error
            return self._environment

    async def _keep_alive(self) -> None:
        while True:
            await anyio.sleep(self._ping_seconds)
            async with anyio.create_task_group() as pings:  # each has a deadline
                for session in tuple(self.sessions):
                    pings.start_soon(session.ping)
