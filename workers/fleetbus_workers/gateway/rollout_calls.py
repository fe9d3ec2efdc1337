"""Calls with the key of a parent, over HTTP: each is of the rollout that it names, or whose conversation it continues.

A name stands in the path (``/s/KEY/r/NAME/v1/...``), in the header ``X-Session-ID``, or in the body's ``prompt_cache_key``; the
first of these that is there counts. Answers name their session in the header ``X-Fleetbus-Session``. Below: `rollouts`.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.environment.adapters.agent.dialects.base import Dialect
from fleetbus_workers.environment.adapters.agent.endpoint import (
    BODY_BYTES,
    ModelCalls,
    digest_call,
    is_repetition,
    parse_call,
    read_keys,
    read_named,
)
from fleetbus_workers.environment.adapters.agent.sessions import REWARD_PREFIX, AgentSession
from fleetbus_workers.gateway.agent_sessions import AgentSessions
from fleetbus_workers.gateway.rollouts import Parent, Rollouts, name_episode
from fleetbus_workers.serving.request_body import read_body

SESSION_HEADER = "X-Fleetbus-Session"


class _Named(msgspec.Struct):
    prompt_cache_key: str | None = None


class RolloutCalls(ModelCalls):
    """`ModelCalls` for keys of sessions and of parents."""

    def __init__(self, sessions: AgentSessions, rollouts: Rollouts) -> None:
        super().__init__(sessions)
        self._rollouts = rollouts

    async def _check_key(self, request: Request) -> None:
        if self._rollouts.read_parent(read_keys(request)) is None:
            await super()._check_key(request)

    async def _call(self, dialect: Dialect, request: Request) -> Response:
        answer = await super()._call(dialect, request)
        if session := getattr(request.state, "session", ""):
            answer.headers[SESSION_HEADER] = session
        return answer

    async def _find_session(self, dialect: Dialect, request: Request) -> tuple[AgentSession, bytes | None]:
        parent = self._rollouts.read_parent(read_keys(request))
        if parent is None:
            return await super()._find_session(dialect, request)
        with self._rollouts.one_request(parent):
            body = await read_body(request, limit=BODY_BYTES)
            return await self._find_rollout(parent, dialect, request, body), body

    async def _find_rollout(self, parent: Parent, dialect: Dialect, request: Request, body: bytes) -> AgentSession:
        given = read_name(request, body)
        if given:
            name = given
        else:
            call, digest = parse_call(dialect, body, read_named(request)), digest_call(request, body)
            name = await self._rollouts.choose_name(parent, call, digest, repetition=is_repetition(request))
        session = await self._rollouts.find_named(parent, name)
        if not given:
            self._rollouts.remember(parent, name, session)
        request.state.session = name_episode(parent.id, name)
        return session


def read_name(request: Request, body: bytes) -> str:
    """The name that a call gives to its rollout; empty for none."""
    named = str(request.path_params.get("rollout", "")) or request.headers.get("x-session-id", "")
    if named:
        return named
    try:
        return msgspec.json.decode(body, type=_Named).prompt_cache_key or ""
    except UNREADABLE:
        return ""  # said when the body is parsed


async def describe_rollouts(sessions: AgentSessions, rollouts: Rollouts, parent_id: str, name: str, url: str) -> Response:
    """The rollouts of a parent with the keys that end them, for whoever grades them."""
    found = [
        {
            "name": each,
            "id": request.episode_id,
            "key": sessions.make_key(request),
            "reward_key": sessions.make_key(request, REWARD_PREFIX),
            "expires": request.deadline_ns // 10**9,
            "url": f"{url}/sessions/{request.episode_id}",
        }
        for each, request in await rollouts.list_rollouts(parent_id, name)
    ]
    return JSONResponse({"rollouts": found}, headers={"Cache-Control": "no-store"})
