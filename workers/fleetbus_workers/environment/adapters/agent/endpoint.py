"""The HTTP endpoint that agents take for a language model: one per environment worker, on loopback, a key per session.

The key is taken as bearer token, as ``x-api-key`` or ``x-goog-api-key``, or in the path (``/s/KEY/v1/...``); no other header
names a session. A call is answered when its episode's step has the policy's action, which is in the log by then.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.environment.adapters.agent.answers import (
    REFUSALS,
    StreamedAnswer,
    answer_refusal,
    get_status,
    refuse,
    wait_for_answer,
)
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.dialects.base import CHANGES_SAMPLING, AgentCall, Dialect, InvalidCall
from fleetbus_workers.environment.adapters.agent.dialects.formats import tell_formats
from fleetbus_workers.environment.adapters.agent.faults import Refused
from fleetbus_workers.environment.adapters.agent.models import COUNTS, describe_model, estimate_tokens, list_models
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession, LocalSessions, SessionDirectory
from fleetbus_workers.serving.bounded_json import TooManyValues, check_values
from fleetbus_workers.serving.browser_guard import BrowserGuard, GuardSettings, build_guard_settings
from fleetbus_workers.serving.listeners import BACKLOG, bind
from fleetbus_workers.serving.request_body import BodyRefused, read_body
from fleetbus_workers.serving.serve import serve

HOST = "127.0.0.1"
BODY_BYTES = 4 << 20
"""Most of a request: about a million tokens."""

REWARD_BYTES = 1 << 16

log = structlog.get_logger(__name__)


class AgentEndpoint:
    """Serves while `run` is entered; ``url`` is known from then on."""

    def __init__(self) -> None:
        self.url = ""
        self.port = 0
        self._sessions = LocalSessions()
        self.open_session = self._sessions.open

    @asynccontextmanager
    async def run(self, socket_path: Path | None = None) -> AsyncIterator[None]:
        """Serve on a free port of the loopback, and on a Unix socket for agents that cannot reach that."""
        listener = bind(HOST, 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        listeners = [listener] if socket_path is None else [listener, bind_path(socket_path)]
        stop = anyio.Event()
        async with open_first_error_task_group() as group:
            for each in listeners:
                group.start_soon(serve, self.build_application(), each, stop)
            try:
                yield
            finally:
                self._sessions.end_all()
                stop.set()

    def build_application(self) -> Starlette:
        calls = ModelCalls(self._sessions)
        routes = [*calls.build_routes(), Route("/v1/reward", self._grade, methods=["POST"])]
        settings = build_guard_settings(HOST, (), (), content_types=("application/json",))
        return build_application([*routes, Mount("/s/{key}", routes=routes)], settings)

    async def _grade(self, request: Request) -> Response:
        """``{"reward": NUMBER or null, "reason": TEXT}``, once, with the reward key; null excludes the episode."""
        session = self._sessions.find_graded(read_keys(request))
        posted = parse_reward(await read_body(request, limit=REWARD_BYTES))
        refused = posted if isinstance(posted, Response) else take_reward(session, posted)
        return refused or JSONResponse({"accepted": True})


def build_application(routes: Sequence[BaseRoute], settings: GuardSettings) -> Starlette:
    """An application of these routes, with what all of them need."""
    handlers: dict[object, Any] = {BodyRefused: refuse_body, ClientDisconnect: drop_call}
    handlers |= dict.fromkeys(REFUSALS, answer_refusal)
    return Starlette(routes=routes, middleware=[Middleware(BrowserGuard, settings=settings)], exception_handlers=handlers)


class ModelCalls:
    """The endpoint that agents call, for the sessions that ``sessions`` knows."""

    def __init__(self, sessions: SessionDirectory) -> None:
        self._sessions = sessions

    def build_routes(self) -> list[BaseRoute]:
        counts = [Route(path, partial(self._count_tokens, each), methods=["POST"]) for path, each in COUNTS.items()]
        calls = [Route(path, partial(self._call, each), methods=["POST"]) for path, each in DIALECTS.items()]
        models = [
            Route(f"/{version}/models{name}", self._describe_models, methods=["GET"])
            for version in ("v1", "v1beta")
            for name in ("", "/{model:path}")
        ]
        return [*counts, *calls, *models]

    async def _call(self, dialect: Dialect, request: Request) -> Response:
        try:
            session, body = await self._find_session(dialect, request)
            with session.one_request():
                body = await read_body(request, limit=BODY_BYTES) if body is None else body
                call = self._parse(session, dialect, body, request)
                pending = session.enter(call, digest_call(request, body), repetition=is_repetition(request))
                if call.stream:
                    return StreamedAnswer(session, dialect, call, pending)
                return await wait_for_answer(dialect, call, pending, request)
        except BodyRefused as refused:
            return refuse(dialect, refused.status, str(refused))
        except InvalidCall as invalid:
            log.warning("agent call is invalid; refusing it", reason=str(invalid))
            return refuse(dialect, 400, str(invalid), invalid.code)
        except REFUSALS as refused:
            return refuse(dialect, get_status(refused), str(refused))

    async def _find_session(self, dialect: Dialect, request: Request) -> tuple[AgentSession, bytes | None]:
        """The session of a call, and its body if that had to be read for it."""
        return await self._sessions.find(read_keys(request)), None

    async def _check_key(self, request: Request) -> None:
        """Raises one of `REFUSALS`."""
        await self._sessions.find(read_keys(request))

    def _parse(self, session: AgentSession, dialect: Dialect, body: bytes, request: Request) -> AgentCall:
        """The call in a body; one that is refused is remembered, for what becomes of its agent."""
        try:
            call = parse_call(dialect, body, read_named(request))
            if call.formats and session.refuses_formats:
                raise InvalidCall(f"{call.formats[0].field} is not supported here: {CHANGES_SAMPLING}")
            if fresh := set(call.left_out) - session.left_out:
                session.left_out |= fresh
                log.warning("agent offers tools that only their vendor runs; leaving them out", kinds=sorted(fresh))
            return call
        except InvalidCall as invalid:
            session.refused = Refused(body=body, reason=str(invalid))
            raise

    async def _describe_models(self, request: Request) -> Response:
        """The model that the path names, or all."""
        await self._check_key(request)
        name = request.path_params.get("model")
        return JSONResponse(list_models() if name is None else describe_model(name))

    async def _count_tokens(self, dialect: Dialect, request: Request) -> Response:
        """An estimate, and no turn."""
        try:
            await self._check_key(request)
        except REFUSALS as refused:
            return refuse(dialect, get_status(refused), str(refused))
        return JSONResponse(estimate_tokens(await read_body(request, limit=BODY_BYTES)))


def parse_reward(body: bytes) -> PostedReward | Response:
    """The reward in a body; what is wrong with it otherwise."""
    try:
        return msgspec.json.decode(body, type=PostedReward)
    except UNREADABLE as error:
        return JSONResponse({"detail": f"the body is no reward: {error}"}, 400)


def take_reward(session: AgentSession, body: PostedReward) -> Response | None:
    """Grade the session; why not otherwise."""
    if not session.takes_reward:
        return JSONResponse({"detail": "the task has a verifier, which gives the reward"}, 403)
    if not session.grade(body.reward, body.reason, body.seats):
        return JSONResponse({"detail": "the episode has a reward, or is over"}, 409)
    return None


class PostedReward(msgspec.Struct, forbid_unknown_fields=True):
    """The reward that an agent posts for its own episode, and those of its seats by name."""

    reward: float | None
    reason: str = ""
    seats: dict[str, float | None] = {}


def bind_path(path: Path) -> socket.socket:
    """A listening Unix socket that everybody may connect to who can reach it; a key is needed all the same."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    os.chmod(path, 0o666)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def read_named(request: Request) -> dict[str, object]:
    """Read what the path says of a call."""
    return {name: value for name, value in request.path_params.items() if name not in ("key", "rollout")}


def parse_call(dialect: Dialect, body: bytes, named: Mapping[str, object]) -> AgentCall:
    """The call in a body, with what its path ``named``. Raises `InvalidCall`."""
    try:
        check_values(body)
        decoded = msgspec.json.decode(body)
    except TooManyValues as many:
        raise InvalidCall(str(many)) from None
    except UNREADABLE as error:
        raise InvalidCall(f"the body is no JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise InvalidCall("the body has to be a JSON object")
    try:
        call = dialect.parse({**decoded, **named})
        call = msgspec.structs.replace(call, messages=tell_formats(call.messages, call.formats))
        msgspec.msgpack.encode(call)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidCall(f"the body has a value that cannot be stored: {error}") from None
    return call


def digest_call(request: Request, body: bytes) -> str:
    """The digest that a repetition shares with its call: of path, idempotency key and body."""
    digest = hashlib.blake2b(request.url.path.encode() + b"\0", digest_size=16)
    digest.update(request.headers.get("idempotency-key", "").encode() + b"\0" + body)
    return digest.hexdigest()


def is_repetition(request: Request) -> bool:
    """True if the client says that it sent this call before."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0") or "idempotency-key" in request.headers


def read_keys(request: Request) -> tuple[str, ...]:
    """The keys that a request brings: in the path, in a vendor's header, as bearer token."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    keys = (
        request.path_params.get("key", ""),
        request.headers.get("x-api-key", ""),
        request.headers.get("x-goog-api-key", ""),
        token.strip() if scheme.lower() == "bearer" else "",
    )
    return tuple(filter(None, keys))


async def refuse_body(request: Request, refused: Exception) -> Response:
    return JSONResponse({"detail": str(refused)}, refused.status if isinstance(refused, BodyRefused) else 400)


async def drop_call(request: Request, gone: Exception) -> Response:
    return Response(status_code=499)
