"""The HTTP interface of ``fleetbus gateway agents``: sessions for agents that run elsewhere, and what these agents call.

Who opens sessions brings the token, where there is one; what concerns one session is asked with its key, and what ends it with
its reward key, which the agent does not need (docs/decisions/0185-rewards-have-a-key-of-their-own.md).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from fleetbus.core.algorithms.reward_components import VERIFIER
from fleetbus.errors import UserError
from fleetbus.tasks.files import build_tasks
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, Task
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.environment.adapters.agent.answers import cancel_when_disconnected
from fleetbus_workers.environment.adapters.agent.endpoint import (
    REWARD_BYTES,
    PostedReward,
    build_application,
    parse_reward,
    read_keys,
    take_reward,
)
from fleetbus_workers.environment.adapters.agent.sessions import (
    MOVED,
    REWARD_PREFIX,
    AgentSession,
    KeyRefused,
    SessionMoved,
    TooManyCalls,
)
from fleetbus_workers.gateway.agent_keys import PREFIX
from fleetbus_workers.gateway.agent_sessions import OWN_PREFIX, AgentSessions, Offer
from fleetbus_workers.gateway.rollout_calls import RolloutCalls, describe_rollouts
from fleetbus_workers.gateway.rollouts import LISTING_PREFIX, MAX_ROLLOUTS, Parent, Rollouts, write_task
from fleetbus_workers.serving.bounded_json import TooManyValues, check_values
from fleetbus_workers.serving.browser_guard import GuardSettings
from fleetbus_workers.serving.request_body import read_body

MAX_WAIT_SECONDS = 300.0
WAIT_SECONDS = 30.0
BODY_BYTES = 1 << 19
"""Most of a session's task."""


STOPPING = "the gateway is stopping: ask another one"


class WantedSession(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A session that is asked for: an evaluation of ``task``, or of the run's task of the key ``task_key``, with ``version`` of
    the policy (None: the newest); or what the learner trains next. ``rollouts``: a key that opens up to so many evaluations."""

    purpose: Literal["evaluate", "train"] = "evaluate"
    task: dict[str, Any] | None = None
    task_key: str = ""
    version: int | None = None
    temperature: float | None = None
    rollouts: int | None = None
    wait: float = WAIT_SECONDS


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """The parts below the interface. ``ask`` asks for an evaluation under an id; ``read`` reads an episode's turns;
    ``is_full``: no slot is free; ``tasks`` are the run's, by key."""

    sessions: AgentSessions
    rollouts: Rollouts
    url: str
    token: str
    tasks: Mapping[str, Task]
    ask: Callable[[Task, int | None, float | None, str], Awaitable[EpisodeRequested]]
    read: Callable[[str], Awaitable[dict[str, Any] | None]]
    is_full: Callable[[], bool]
    drain: anyio.Event


def build_agent_application(gateway: Gateway, guard: GuardSettings) -> Starlette:
    """The whole application."""
    service = _Service(gateway)
    calls = RolloutCalls(gateway.sessions, gateway.rollouts).build_routes()
    sessions = [
        Route("/sessions", service.open, methods=["POST"]),
        Route("/sessions/next", service.give_next, methods=["GET"]),
        Route("/sessions/{session}/reward", service.reward, methods=["POST"]),
        Route("/sessions/{session}/end", service.end, methods=["POST"]),
        Route("/sessions/{session}/trajectory", service.show, methods=["GET"]),
        Route("/sessions/{session}/rollouts", service.list_rollouts, methods=["GET"]),
    ]
    mounted = [Mount(path, routes=calls) for path in ("/s/{key}/r/{rollout}", "/s/{key}")]
    return build_application([*calls, *sessions, *mounted], guard)


class _Service:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions = gateway.sessions

    async def open(self, request: Request) -> Response:
        """An evaluation, or the next of the learner's episodes."""
        self._check_token(request)
        try:
            wanted = parse_body(await read_body(request, limit=BODY_BYTES))
            if wanted.purpose == "train":
                if wanted.task is not None or wanted.task_key or wanted.version is not None or wanted.rollouts is not None:
                    raise ValueError(
                        "what is trained is the learner's to choose: leave out task, task_key, version and rollouts"
                    )
                return await self._give(request, wanted.wait)
            task = self._find_task(wanted)
            if wanted.rollouts is not None:
                return self._open_parent(wanted, task)
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, 400)
        except LookupError as error:
            return JSONResponse({"detail": str(error.args[0])}, 404)
        if self._gateway.drain.is_set():
            raise SessionMoved(STOPPING)
        if self._gateway.is_full():
            raise TooManyCalls("as many sessions are open as this gateway has slots: end one, or repeat the call")
        asked = await self._gateway.ask(task, wanted.version, wanted.temperature, f"{OWN_PREFIX}{secrets.token_hex(8)}")
        return self._describe(Offer(self._sessions.make_key(asked), asked), 201)

    def _open_parent(self, wanted: WantedSession, task: Task) -> Response:
        """A key for many conversations, each of which becomes an evaluation with its first call. Raises `ValueError`."""
        parent = Parent(
            id=f"{OWN_PREFIX}{secrets.token_hex(8)}",
            rollouts=wanted.rollouts or 0,
            task="" if wanted.task_key else write_task(task),
            task_key=wanted.task_key,
            version=wanted.version,
            temperature=wanted.temperature,
        )
        key, rollouts_key, expires_ns = self._gateway.rollouts.make_keys(parent)
        shown: dict[str, object] = {"id": parent.id, "key": key, "rollouts_key": rollouts_key, "rollouts": parent.rollouts}
        shown["task"] = show_task(task)
        return self._answer_opened(shown, parent.id, expires_ns, 201)

    async def list_rollouts(self, request: Request) -> Response:
        """The rollouts of a parent, or the one of a ``name``, with their keys."""
        parent_id = self._read_episode(request, LISTING_PREFIX)
        name = request.query_params.get("name", "")
        return await describe_rollouts(self._sessions, self._gateway.rollouts, parent_id, name, self._gateway.url)

    async def give_next(self, request: Request) -> Response:
        """The next of the learner's episodes; 204 if none comes within ``wait`` seconds. Not for a page of another site, which
        may send any GET: what it were given would be lost."""
        self._check_token(request)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return JSONResponse({"detail": "sessions are not given to pages of another site"}, 403)
        try:
            seconds = float(request.query_params.get("wait", WAIT_SECONDS))
        except ValueError:
            return JSONResponse({"detail": "wait is a number of seconds"}, 400)
        return await self._give(request, seconds)

    async def _give(self, request: Request, seconds: float) -> Response:
        if self._gateway.drain.is_set():
            raise SessionMoved(STOPPING)
        if not 0 <= seconds <= MAX_WAIT_SECONDS:
            return JSONResponse({"detail": f"wait is a number of seconds, at most {MAX_WAIT_SECONDS:g}"}, 400)
        offer: Offer | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(cancel_when_disconnected, request, group.cancel_scope)
            group.start_soon(self._cancel_when_drained, group.cancel_scope)
            offer = await self._sessions.next_offer(seconds, request.headers.get("idempotency-key", ""))
            group.cancel_scope.cancel()
        if offer is None:
            return Response(status_code=204)
        return self._describe(offer, 200)

    async def _cancel_when_drained(self, scope: anyio.CancelScope) -> None:
        await self._gateway.drain.wait()
        scope.cancel()

    async def reward(self, request: Request) -> Response:
        """``{"reward": NUMBER or null, "reason": TEXT}``: the end of the session. Answered when it is in the log."""
        episode, session = await self._find(request)
        posted = parse_reward(await read_body(request, limit=REWARD_BYTES))
        refused = posted if isinstance(posted, Response) else take_reward(session, posted)
        if refused is None or (isinstance(posted, PostedReward) and session.has_taken(posted.reward)):
            return await self._conclude(episode, session)
        result = await self._sessions.read_result(episode) if refused.status_code == 409 else None
        if result is None:
            return refused
        if isinstance(posted, PostedReward) and is_reward_of(result, posted.reward):
            return JSONResponse(describe_result(result))  # a repetition whose first answer was lost
        return JSONResponse({"detail": "the episode has ended"} | describe_result(result), 409)

    async def end(self, request: Request) -> Response:
        """The end of a session without a reward of the agent's: the verifier's, or none."""
        episode, session = await self._find(request)
        if session.over and (result := await self._sessions.read_result(episode)) is not None:
            return JSONResponse(describe_result(result))
        return await self._conclude(episode, session)

    async def _conclude(self, episode: str, session: AgentSession) -> Response:
        session.conclude()
        result = await self._sessions.wait_for_result(episode, session)
        if result is None:
            raise SessionMoved(MOVED)
        return JSONResponse(describe_result(result))

    async def show(self, request: Request) -> Response:
        """Show a session as the log has it: its turns with token ids, and its end."""
        episode = self._read_episode(request, PREFIX)
        trajectory = await self._gateway.read(episode)
        return JSONResponse({"detail": "there is no such session"}, 404) if trajectory is None else JSONResponse(trajectory)

    async def _find(self, request: Request) -> tuple[str, AgentSession]:
        episode = self._read_episode(request, REWARD_PREFIX)
        return episode, await self._sessions.find_episode(episode)

    def _read_episode(self, request: Request, prefix: str) -> str:
        """The session that is named. Raises `KeyRefused` if the key is another's, or of another kind."""
        named = str(request.path_params["session"])
        if self._sessions.read_episode(read_keys(request), prefix) != named:
            raise KeyRefused("this key is of another session")
        return named

    def _check_token(self, request: Request) -> None:
        token = self._gateway.token.encode()
        if token and not any(hmac.compare_digest(key.encode("utf-8", "replace"), token) for key in read_keys(request)):
            raise KeyRefused("sessions are opened with the token of this gateway (AGENTS_TOKEN), as bearer")

    def _find_task(self, wanted: WantedSession) -> Task:
        """Raises `LookupError`, and `ValueError` for what is no task."""
        if (wanted.task is None) == (not wanted.task_key):
            raise ValueError("give either task or task_key")
        if wanted.task is None:
            if wanted.task_key not in self._gateway.tasks:
                raise LookupError(f"the run has no task with the key {wanted.task_key!r}")
            return self._gateway.tasks[wanted.task_key]
        try:
            (task,) = build_tasks([wanted.task], "task")
        except UserError as error:
            raise ValueError(str(error)) from error
        if task.verifier:
            raise ValueError("a verifier is code that runs here: give a task of the run by its task_key, or grade it yourself")
        return task

    def _describe(self, offer: Offer, status: int) -> Response:
        """A session as its opener gets it."""
        request, task = offer.request, offer.request.task
        shown: dict[str, object] = {
            "id": request.episode_id,
            "key": offer.key,
            "reward_key": self._sessions.make_key(request, REWARD_PREFIX),
            "purpose": "train" if request.split == "train" else "evaluate",
            "task": show_task(task),
            "takes_reward": not task.verifier,
            "max_turns": request.max_turns,
        }
        return self._answer_opened(shown, request.episode_id, request.deadline_ns, status)

    def _answer_opened(self, shown: dict[str, object], session: str, expires_ns: int, status: int) -> Response:
        """Describe what was opened, with its addresses."""
        url = self._gateway.url
        addresses = {"openai_base_url": f"{url}/v1", "anthropic_base_url": url, "gemini_base_url": url}
        shown |= {"expires": expires_ns // 10**9, "url": f"{url}/sessions/{session}", **addresses}
        return JSONResponse(shown, status, headers={"Cache-Control": "no-store"})


def show_task(task: Task) -> dict[str, object]:
    """A task as an agent gets it: without what grades it."""
    return {"key": task.key, "prompt": task.prompt, "seed": task.seed, "config": task.config, "env": task.env}


def parse_body(body: bytes) -> WantedSession:
    """Raises `ValueError`."""
    try:
        check_values(body)
        wanted = msgspec.json.decode(body, type=WantedSession)
        msgspec.msgpack.encode(wanted)
    except (TooManyValues, OverflowError, UnicodeEncodeError, *UNREADABLE) as error:
        raise ValueError(f"the body asks for no session: {error}") from None
    if wanted.temperature is not None and not 0 <= wanted.temperature <= 10:
        raise ValueError("temperature is a number from 0 to 10")
    if wanted.version is not None and wanted.version < 0:
        raise ValueError("version is a number from 0")
    if wanted.rollouts is not None and not 1 <= wanted.rollouts <= MAX_ROLLOUTS:
        raise ValueError(f"rollouts is a number from 1 to {MAX_ROLLOUTS}")
    return wanted


def is_reward_of(result: EpisodeFinished, reward: float | None) -> bool:
    """True if an episode ended with this reward of its agent's, by itself or as a component."""
    if reward is None:
        return result.outcome == "verifier_unknown"
    return reward in (result.reward, result.reward_components.get(VERIFIER))


def describe_result(result: EpisodeFinished) -> dict[str, object]:
    """Describe the end of an episode."""
    return {"outcome": result.outcome, "reward": result.reward, "error_class": result.error_class, "error": result.error}
