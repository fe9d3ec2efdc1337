"""Environments behind the remote-gym protocol (multipart over HTTP): text actions, text and images as observations.

Until its first step an episode may move to another server; afterwards a lost session is a lost episode (``env_failed``). Above
it is the session of an environment worker, below it one `RemoteGymSession`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import structlog

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.remote_gym.client import (
    RemoteGymError,
    RemoteGymSession,
    ServerPool,
    ServerUnreachable,
    SessionGone,
    connect,
)
from fleetbus_workers.environment.adapters.remote_gym.config import parse_urls, read_config
from fleetbus_workers.environment.adapters.remote_gym.wire import DecodedResponse, WireError, encode_image
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage, insert_images
from fleetbus_workers.environment.task_permissions import TaskPermissions

NOTHING = TaskPermissions()

PLACEHOLDER = "<image>"
"""Where an image belongs in an observation's text."""

_log = structlog.get_logger(__name__)


def build(context: AdapterContext) -> Factory:
    """Environments on the spec's servers, else on the task's. Raises `UserError` for what is no URL."""
    pool, default_urls = ServerPool(), parse_urls(context.rest)
    if context.rest and not default_urls:
        raise UserError(f"{context.rest!r} is not the address of a remote-gym server, as in http://127.0.0.1:8000")
    permissions, store_image = context.permissions, context.store_image
    make = partial(RemoteGymEnvironment, pool, default_urls, store_image=store_image, permissions=permissions)
    return Factory(make, pool.run)


class RemoteGymEnvironment:
    """One episode. Without ``store_image`` a placeholder text replaces each image."""

    replayable = False

    def __init__(
        self,
        pool: ServerPool,
        urls: Sequence[str],
        *,
        store_image: StoreImage | None = None,
        permissions: TaskPermissions = NOTHING,
    ) -> None:
        self._permissions = permissions
        self._pool = pool
        self._urls = urls
        self._store_image = store_image
        self._session: RemoteGymSession | None = None
        self._rewards: list[float] = []
        self._info: dict[str, Any] = {}

    async def open(self, task: Task) -> None:
        """Connect and begin in one round trip. Raises `EnvironmentFailed`; waits while all servers are busy."""
        self._task = task
        self._config, self._remote = read_config(task.config, self._urls, self._permissions)
        self._reset_response = await self._connect()

    async def _connect(self) -> DecodedResponse:
        self._session, response = await connect(self._pool, self._config, self._remote, self._task.seed or 0)
        return response

    async def reset(self) -> Start:
        try:
            system = await self._require_session().call("system_prompt")
        except (SessionGone, ServerUnreachable) as lost:
            _log.warning(
                "remote gym session is lost; connecting to another server", server=self._require_session().url, reason=str(lost)
            )
            await self._abandon_session()
            self._reset_response = await self._connect()
            system = await self._require_session().call("system_prompt")
        messages = [
            await self._message("system", system),
            await self._message("user", self._reset_response, before=self._task.prompt),
        ]
        info = self._reset_response.fields.get("info")
        return Start(
            messages=tuple(message for message in messages if message.content), info=info if isinstance(info, dict) else {}
        )

    async def step(self, action: Action) -> Step:
        answer = await self._require_session().call("step", {"action_str": action.text})
        info = answer.fields.get("info")
        self._info = info if isinstance(info, dict) else {}
        if self._info.get("training_usable") is False:
            raise EnvironmentFailed(f"the server calls the episode unusable: {self._info.get('error', 'without a reason')}")
        reward = answer.fields.get("reward")
        if not isinstance(reward, int | float):
            raise EnvironmentFailed(f"the server sent {reward!r} as reward")
        self._rewards.append(float(reward))
        done = answer.fields.get("done") is True
        truncated = done and (self._info.get("truncated") is True or self._info.get("TimeLimit.truncated") is True)
        return Step(
            messages=(await self._message("user", answer),),
            reward=float(reward),
            terminated=done and not truncated,
            truncated=truncated,
            info=self._info,
        )

    async def _message(self, role: Any, answer: DecodedResponse, *, before: str = "") -> ChatMessage:
        text = str(answer.fields.get("obs") or "")
        text = "\n\n".join(part for part in (before, text) if part)
        return ChatMessage(
            role=role, content=await insert_images(text, await _decode_images(answer), self._store_image, PLACEHOLDER)
        )

    async def state(self) -> dict[str, Any]:
        return {"server": self._session.url if self._session else "", "steps": len(self._rewards), "info": self._info}

    async def verify(self) -> Verdict:
        """The sum of the rewards; no verdict before the first one."""
        if not self._rewards:
            return Verdict(reward=None, reason="the environment gave no reward")
        return Verdict(reward=math.fsum(self._rewards))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def held(self) -> str:
        return f"{self._session.id} {self._session.url}" if self._session is not None else ""

    async def release(self, task: Task, held: str) -> None:
        session_id, _, url = held.partition(" ")
        config, _ = read_config(task.config, self._urls, self._permissions)
        if url in config.base_urls:
            await RemoteGymSession(self._pool, config, url, session_id).close()

    async def _abandon_session(self) -> None:
        """Give up a session whose server is gone, without waiting for it."""
        with anyio.move_on_after(1):
            await self.close()
        self._session = None

    def _require_session(self) -> RemoteGymSession:
        if self._session is None:
            raise RemoteGymError("the remote gym's session was never opened, or is closed")
        return self._session


async def _decode_images(answer: DecodedResponse) -> list[EncodedImage]:
    try:
        return [await anyio.to_thread.run_sync(encode_image, data) for data in answer.images]
    except WireError as error:
        raise EnvironmentFailed(str(error)) from error
