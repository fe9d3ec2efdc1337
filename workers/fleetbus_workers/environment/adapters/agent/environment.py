"""Agents that own their loop as an environment: the agent runs as it is, its model calls are the episode's turns.

Per episode the agent is started with a base URL and a key of its own. Its first call is what the policy sees first, the
policy's action is the answer to it, its next call the next observation: it continues an earlier conversation token for token,
or begins a segment, where the agent edited its history, changed its tools or started a sub-agent. When the agent ends, it is
graded: by the task's verifier, which may read the files of its working folder and call the code in them, or by what a function
returned. What posts a reward never stands where the policy's own programs could read it
(docs/decisions/0185-rewards-have-a-key-of-their-own.md).
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec

from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas import Action, Task, UntrainedTurn
from fleetbus_workers.environment.adapters.agent.conversations import Conversations
from fleetbus_workers.environment.adapters.agent.faults import is_programs_error
from fleetbus_workers.environment.adapters.agent.host import AgentHost
from fleetbus_workers.environment.adapters.agent.process import AgentProcess
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from fleetbus_workers.environment.adapters.common.fresh_python import CALL, FRESH, FreshPython
from fleetbus_workers.environment.base import NO_LIMITS, Ahead, EnvironmentFailed, Start, Step, TurnLimits, Verdict
from fleetbus_workers.environment.isolation.foreign_files import find_outside, read_regular_file
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable
from fleetbus_workers.environment.isolation.verifier.base import Grader, grade

OwnReward = Literal["never", "returns", "posts"]
"""The way in which an agent grades itself where its task has no verifier: not at all, by what its function returns, or by a
post to ``FLEETBUS_REWARD_URL``."""

UNGRADED = (
    "the task has no verifier, and a command cannot grade itself: give tasks a verifier, make the agent a function that "
    "returns its reward, or set environment.agent_reward_url if nothing that the policy says is executed"
)
FILE_BYTES = 1 << 20
"""Most of a file that a verifier reads."""


class AgentEnvironment:
    """One episode of an agent that ``host`` starts. ``replayable``: it asks the same again where it is answered the same.
    ``paces_itself``: see `fleetbus_workers.environment.base.PacesItself`."""

    shows_whole = True
    asks_ahead = True

    def __init__(
        self,
        host: AgentHost,
        *,
        grader: Grader,
        exit_seconds: float,
        grades: OwnReward,
        settings: EnvironmentSettings | None = None,
        replayable: bool = False,
        paces_itself: bool = False,
    ) -> None:
        self.replayable = replayable
        self.paces_itself = paces_itself
        self._host = host
        self._grader = grader
        self._grades = grades
        self._exit_seconds = exit_seconds
        self._settings = settings or EnvironmentSettings()
        self._held = AsyncExitStack()
        self._task: Task | None = None
        self._session: AgentSession | None = None
        self._process: AgentProcess | None = None
        self._folder = Path()
        self._conversations: Conversations | None = None
        self._fault_reward: float | None = None
        self._started = anyio.Event()

    async def open(self, task: Task) -> None:
        """Make the session and the working folder, with the task as ``task.json``."""
        if not task.verifier and self._grades == "never":
            raise EnvironmentFailed(UNGRADED)
        self._task = task
        self._session = self._held.enter_context(self._host.endpoint.open_session(takes_reward=not task.verifier))
        self._session.takes_late_reward = True
        self._session.refuses_formats = self._settings.agent_formats == "refused"
        self._conversations = Conversations(self._session, trains_side_calls=self._settings.agent_side_calls == "trained")
        self._folder = self._host.make_folder()
        self._held.push_async_callback(self._host.remove_folder, self._folder)
        shown = {"key": task.key, "prompt": task.prompt, "seed": task.seed, "config": task.config, "env": task.env}
        if self._grades == "returns":
            shown["reward_url"] = self._build_reward_url()
        (self._folder / "task.json").write_bytes(msgspec.json.encode(shown))

    async def wait_to_start(self) -> None:
        """See `AgentHost.take_place`."""
        await self._host.take_place(self._started)

    async def reset(self) -> Start:
        """Start the agent and wait for its first call. Raises `EnvironmentFailed` if it ends without one."""
        assert self._session is not None and self._conversations is not None
        self._process = await self._host.start(self._folder, self._build_variables(), ended=self._session.conclude)
        attached = await self._conversations.receive_call()
        self._started.set()
        if attached is None:
            raise EnvironmentFailed(f"the agent ended before it called a model{self._process.read_last_line()}")
        return Start(messages=attached.messages, tools=attached.tools, seat=self._conversations.seat)

    async def step(self, action: Action) -> Step:
        """Answer the agent's call and wait for its next one; over when the agent has ended."""
        assert self._conversations is not None
        called = len(self._conversations.answer(action).tool_calls)
        attached = await self._conversations.receive_call()
        if attached is None:
            fault = self._judge_failure()
            return Step(terminated=True, tool_calls=called, info=self._conversations.describe() | fault)
        change = self._conversations.follow(attached)
        return Step(messages=attached.messages, tool_calls=called, context=change, seat=self._conversations.seat)

    def _build_variables(self) -> dict[str, str]:
        assert self._session is not None
        url, key = self._host.endpoint.url, self._session.key
        reward_url = self._build_reward_url() if self._grades == "posts" else ""
        return ({"FLEETBUS_REWARD_URL": reward_url} if reward_url else {}) | {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": url,
            "GEMINI_API_KEY": key,
            "FLEETBUS_TASK_FILE": str(self._folder / "task.json"),
        }

    def _build_reward_url(self) -> str:
        """The address that takes the reward; none where a verifier decides."""
        assert self._session is not None
        session = self._session
        return f"{self._host.endpoint.url}/s/{session.reward_key}/v1/reward" if session.takes_reward else ""

    def _judge_failure(self) -> dict[str, object]:
        """An agent that fails before it has a reward is no doing of the policy's, unless its last answer could not be used:
        then the evidence, for the result. Raises `EnvironmentFailed` otherwise."""
        assert self._process is not None and self._session is not None and self._conversations is not None
        status = self._process.status
        if not status or self._session.is_graded:
            return {}
        ended = f"the agent ended with status {status}{self._process.read_last_line()}"
        fault = self._conversations.find_fault() if is_programs_error(status) else {}
        if not fault or not self._settings.agent_crash_reward:
            raise EnvironmentFailed(ended)
        self._fault_reward = float(self._settings.agent_crash_reward)
        return {"agent_failed_on_answer": fault | {"ended": ended}}

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
        task = self._task.key if self._task else ""
        return {"task": task, **(self._conversations.describe_state() if self._conversations else {})}

    async def verify(self) -> Verdict:
        """Ask the agent to stop, end it, then take its own reward or the verifier's: nothing of it runs while it is graded."""
        assert self._session is not None and self._process is not None and self._conversations is not None
        self._session.end()
        with anyio.move_on_after(self._exit_seconds):
            await self._process.wait()
        await self._process.end_all()
        if self._fault_reward is not None:
            return Verdict(reward=self._fault_reward, reason="the agent could not use the policy's answer")
        if self._session.is_graded:
            return Verdict(reward=self._session.reward, reason=self._session.reward_reason, seats=self._session.seats)
        said = self._conversations
        return await grade(
            self._grader,
            self._task,
            final_answer=said.final_answer,
            conversation=said.messages,
            tools=FolderTools(self._folder, FreshPython(self._host.make_session)),
        )

    async def close(self) -> None:
        process, self._process = self._process, None
        self._started.set()
        try:
            if process is not None:
                await process.stop()
        finally:
            await self._held.aclose()


class FolderTools:
    """The tools of a verifier: ``read_file`` with a ``path`` below the agent's working folder, and those of `FreshPython`, for
    code that the agent wrote (docs/decisions/0241-verifiers-of-agents-call-what-the-agent-wrote.md)."""

    def __init__(self, folder: Path, python: FreshPython) -> None:
        self._folder = folder
        self._python = python

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any:
        if name == "read_file":
            return await anyio.to_thread.run_sync(self._read_file, str(arguments.get("path", "")))
        if name not in (FRESH, CALL):
            raise LookupError(f"unknown tool {name!r}: there are read_file, {FRESH} and {CALL}")
        try:
            return await self._python.call_tool(name, arguments)
        except IsolationUnavailable as unavailable:
            raise LookupError(f"{name}: {unavailable}") from unavailable

    def _read_file(self, path: str) -> str:
        file = find_outside({"/": self._folder}, f"/{path}")
        content = None if file is None else read_regular_file(file, FILE_BYTES)
        if content is None:
            raise LookupError(f"there is no file {path!r} in the agent's folder")
        return content[:FILE_BYTES].decode(errors="replace")

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("this environment has no database")
