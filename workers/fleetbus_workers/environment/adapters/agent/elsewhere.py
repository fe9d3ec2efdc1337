"""Agents that run elsewhere as an environment: someone else starts them and says when they have ended.

The agent outlives the worker that serves it. An attempt that takes over shows the recorded turns as they were, and answers the
agent's next call: what a call continues follows from the log, and so does the answer to a repetition of the last one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import anyio

from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas import Action, EpisodeRequested, Task, UntrainedTurn
from fleetbus_workers.environment.adapters.agent.conversations import Conversations
from fleetbus_workers.environment.adapters.agent.paths import Attachment
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from fleetbus_workers.environment.base import (
    NO_LIMITS,
    Ahead,
    EnvironmentFailed,
    RecordedTurn,
    Start,
    Step,
    TurnLimits,
    Verdict,
)
from fleetbus_workers.environment.isolation.verifier.base import Grader, grade


class SessionRegistry(Protocol):
    """Makes sessions known to the agents outside."""

    def open_session(self, request: EpisodeRequested) -> AgentSession:
        """The session of an episode; not yet known to anybody."""

    def admit_calls(self, session: AgentSession, request: EpisodeRequested, *, is_new: bool) -> None:
        """From now on calls with its key are its calls; a new one is to be given to an agent."""

    def remove(self, session: AgentSession, request: EpisodeRequested) -> None:
        """The session is over, or is played elsewhere."""


class ElsewhereEnvironment:
    """One episode of an agent outside."""

    replayable = True
    shows_whole = True
    asks_ahead = True

    def __init__(
        self, registry: SessionRegistry, *, grader: Grader, reward_seconds: float, settings: EnvironmentSettings | None = None
    ) -> None:
        self._registry = registry
        self._grader = grader
        self._reward_seconds = reward_seconds
        self._settings = settings or EnvironmentSettings()
        self._request: EpisodeRequested | None = None
        self._recorded: Sequence[RecordedTurn] = ()
        self._is_new = False
        self._session: AgentSession | None = None
        self._conversations: Conversations | None = None
        self._known = False
        self._turn = 0

    def assign(self, request: EpisodeRequested, attempt: int, recorded: Sequence[RecordedTurn]) -> None:
        """See `LivesElsewhere`."""
        self._request, self._recorded, self._is_new = request, recorded, attempt == 1

    async def open(self, task: Task) -> None:
        await anyio.lowlevel.checkpoint()
        assert self._request is not None
        self._session = self._registry.open_session(self._request)
        self._session.takes_late_reward = True
        self._session.refuses_formats = self._settings.agent_formats == "refused"
        self._conversations = Conversations(self._session, trains_side_calls=self._settings.agent_side_calls == "trained")

    async def reset(self) -> Start:
        """Wait for the agent's first call. Raises `EnvironmentFailed` if it ends without one."""
        attached = await self._next_call()
        if attached is None:
            raise EnvironmentFailed("the session was ended before its agent called a model")
        assert self._conversations is not None
        return Start(messages=attached.messages, tools=attached.tools, seat=self._conversations.seat)

    async def step(self, action: Action) -> Step:
        """Answer the agent's call and wait for its next one; over when the agent has ended."""
        assert self._conversations is not None
        called = len(self._conversations.answer(action).tool_calls)
        self._turn += 1
        attached = await self._next_call()
        if attached is None:
            return Step(terminated=True, tool_calls=called, info=self._conversations.describe())
        change = self._conversations.follow(attached)
        return Step(messages=attached.messages, tool_calls=called, context=change, seat=self._conversations.seat)

    async def _next_call(self) -> Attachment | None:
        """The recorded call if there is one, else the next that comes; None when the agent has ended."""
        assert self._conversations is not None and self._session is not None and self._request is not None
        if self._turn < len(self._recorded):
            await anyio.lowlevel.checkpoint()
            own_stops = self._request.sampling.stop
            return self._conversations.restore_call(self._recorded[self._turn].observed, own_stops=own_stops)
        if not self._known:
            self._known = True
            self._registry.admit_calls(self._session, self._request, is_new=self._is_new)
        return await self._conversations.receive_call()

    async def ask_ahead(self) -> Ahead | None:
        """A further call of the agent."""
        assert self._conversations is not None
        return await self._conversations.receive_ahead()

    @property
    def turn_limits(self) -> TurnLimits:
        return self._conversations.turn_limits if self._conversations is not None else NO_LIMITS

    def list_untrained(self) -> tuple[UntrainedTurn, ...]:
        return self._conversations.list_untrained() if self._conversations is not None else ()

    async def state(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return self._conversations.describe_state() if self._conversations is not None else {}

    async def verify(self) -> Verdict:
        """Ask the agent to stop, then take its own reward or the verifier's."""
        assert self._session is not None and self._conversations is not None and self._request is not None
        session = self._session
        session.end()
        if session.takes_reward:
            with anyio.move_on_after(self._reward_seconds):
                await session.concluded.wait()
            if not session.is_graded:
                return Verdict(reward=None, reason="the agent gave no reward, and the task has no verifier")
            return Verdict(reward=session.reward, reason=session.reward_reason, seats=session.seats)
        said = self._conversations
        task, tools = self._request.task, NoTools()
        return await grade(self._grader, task, final_answer=said.final_answer, conversation=said.messages, tools=tools)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        session, self._session = self._session, None
        if session is not None:
            assert self._request is not None
            session.move()
            self._registry.remove(session, self._request)
            session.close()


class NoTools:
    """The calls that a verifier may make of an agent outside: none; it reads what was said."""

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any:
        raise LookupError(f"unknown tool {name!r}: the agent runs elsewhere, and its files are not known here")

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("this environment has no database")
