"""Environments on a server of the Open Reward Standard: one session per episode, actions by tool calls, the server's rewards.

The reward is the sum over the calls ("accumulated over an episode"), or the last one where a task's config has ``"reward":
"last"``. What is the server's failure raises; only what the server says of the policy's own call is an observation. See
docs/decisions/0260-calls-of-the-open-reward-standard-run-once.md. Above it is the session of an environment worker, below it
`server`. A task's ``config``: ``index`` and ``split``, its place in the server's data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fleetbus.core.text.prompts import NO_CALL, format_error, format_further_calls, format_tool_result, format_unknown_tool
from fleetbus.core.text.tool_calls import final_answer, is_done, parse_tool_calls
from fleetbus_schemas import Action, ChatMessage, Task, ToolCall, ToolSpec
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.system_prompts import build_system_prompt
from fleetbus_workers.environment.adapters.common.tool_results import (
    Content,
    answer_first_call,
    build_tool_messages,
    is_final_answer,
    read_final_answer,
)
from fleetbus_workers.environment.adapters.ors.address import parse_address, read_place
from fleetbus_workers.environment.adapters.ors.blocks import build_step, build_tools, describe_blocks, show_blocks
from fleetbus_workers.environment.adapters.ors.client import Unsendable
from fleetbus_workers.environment.adapters.ors.messages import CallResult, Output, TerminalTool
from fleetbus_workers.environment.adapters.ors.rewards import NO_REWARD, EpisodeRewards
from fleetbus_workers.environment.adapters.ors.server import OrsServer, OrsSession
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.isolation.verifier.base import Grader, grade

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle
    from fleetbus_workers.environment.images.observation import StoreImage


def build(context: AdapterContext) -> Factory:
    """Environments on the server at the spec's address. Raises `UserError` if that is none; nothing is asked of the server."""
    server = OrsServer(parse_address(context.rest))
    given = {**context.grading_arguments("fleet"), "store_image": context.store_image, "call_seconds": context.call_seconds}
    return Factory(partial(OrsEnvironment, server, **given), server.run)


class OrsEnvironment:
    """One episode on ``server``; ``call_seconds`` limits a call. Without ``store_image`` a word replaces each image."""

    replayable = False

    def __init__(
        self,
        server: OrsServer,
        *,
        grader: Grader,
        prompt: PromptStyle = "fleet",
        observation_bytes: int = 32_768,
        store_image: StoreImage | None = None,
        call_seconds: float = 60.0,
    ) -> None:
        self._server = server
        self._grader = grader
        self._prompt = prompt
        self._observation_bytes = observation_bytes
        self._store_image = store_image
        self._call_seconds = call_seconds
        self._task = Task(key="")
        self._session: OrsSession | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._terminal: TerminalTool | None = None
        self._conversation: list[ChatMessage] = []
        self._rewards = EpisodeRewards("sum")
        self._answer: str | None = None

    async def open(self, task: Task) -> None:
        """Get a session for the task's place in the server's data. Raises `EnvironmentFailed`."""
        self._task = task
        place = read_place(task, self._server.address)
        self._rewards = EpisodeRewards(place.reward)
        self._session = await self._server.name_session()
        await self._session.create(place.split, place.number)

    async def reset(self) -> Start:
        session, task = self._require_session(), self._task
        blocks, listing = await session.read_prompt(), await session.list_tools()
        self._terminal = listing.terminal_tool
        self._tools = build_tools(listing)
        if not self._tools and self._terminal is None:
            raise EnvironmentFailed(f"the ORS environment of task {task.key} lists no tools")
        shown = await show_blocks(blocks, self._store_image, lambda text: "\n\n".join(filter(None, (task.prompt, text))))
        messages = [ChatMessage(role="user", content=shown)]
        if system := build_system_prompt(self._prompt, self._tools, task):
            messages.insert(0, ChatMessage(role="system", content=system))
        self._conversation = list(messages)
        tools = self._tools if self._prompt == "template" else ()
        return Start(messages=tuple(messages), tools=tools, prompted=len(messages) - 1, offered=self._tools)

    async def step(self, action: Action) -> Step:
        """Have the first call of the action executed; an answer that ends the episode goes to the terminal tool, if any."""
        self._conversation.append(ChatMessage(role="assistant", content=action.text))
        if self._prompt != "template":
            done, calls = is_done(action.text), action.tool_calls or parse_tool_calls(action.text).calls
            if not calls and not done:
                return self._show(NO_CALL)
            step = await self._call_first(calls) if calls else Step()
            return await self._finish(final_answer(action.text), step) if done and not step.terminated else step
        if is_final_answer(action):
            return await self._finish(read_final_answer(action), Step())
        if not action.tool_calls:
            return Step(messages=build_tool_messages(action, ()))
        return answer_first_call(action, await self._call_first(action.tool_calls))

    async def _call_first(self, calls: Sequence[ToolCall]) -> Step:
        more = format_further_calls(len(calls) - 1) if len(calls) > 1 else ""
        if all(tool.name != calls[0].name for tool in self._tools):
            return self._show(format_unknown_tool(calls[0].name, self._tools), more, failed=True)
        result = await self._call(calls[0].name, calls[0].arguments)
        if not result.ok:
            return self._show(format_error(result.error), more, failed=True)
        return await self._record(result.output, more)

    async def _finish(self, answer: str, step: Step) -> Step:
        """End the episode after ``step`` with the policy's answer."""
        self._answer = answer
        if self._terminal is None:
            return msgspec.structs.replace(step, messages=(), terminated=True)
        result = await self._call(self._terminal.name, {self._terminal.arg: answer} if self._terminal.arg else {})
        if not result.ok:
            self._rewards.refusal = f"the environment refused the final answer: {result.error}"
            return msgspec.structs.replace(step, messages=(), terminated=True, tool_errors=step.tool_errors + 1)
        graded = await self._record(result.output)
        self._rewards.finished = True
        calls, reward = step.tool_calls + 1, step.reward + graded.reward
        return msgspec.structs.replace(graded, terminated=True, reward=reward, tool_calls=calls, tool_errors=step.tool_errors)

    async def _call(self, name: str, arguments: Mapping[str, object]) -> CallResult:
        """The server's answer; arguments that are no JSON get none, and never leave."""
        try:
            return await self._require_session().call(name, arguments, self._call_seconds)
        except Unsendable as error:
            return CallResult(ok=False, error=f"the arguments are no JSON: {error}")

    async def _record(self, output: Output, more: str = "") -> Step:
        """The step of a call that ran: its own part of the episode's reward, and what it shows."""
        reward = self._rewards.record(output.reward, finished=output.finished)
        content = await show_blocks(output.blocks, self._store_image, format_tool_result, more)
        step = self._show(content, more, output=describe_blocks(output.blocks))
        own, missing, info = reward or 0.0, NO_REWARD if reward is None else "", output.metadata or {}
        return msgspec.structs.replace(step, terminated=output.finished, reward=own, unrewarded=missing, info=info)

    def _show(self, content: Content, more: str = "", *, failed: bool = False, output: str | None = None) -> Step:
        """A step that shows ``content``, kept for the verifier; see `build_step`."""
        step = build_step(content, more, self._observation_bytes, failed=failed, output=output)
        self._conversation += step.messages
        return step

    async def state(self) -> dict[str, Any]:
        return {"server": self._server.address.url, "calls": self._rewards.calls, "finished": self._rewards.finished}

    async def verify(self) -> Verdict:
        """The task's verifier if it has one, else the server's rewards; no verdict if it gave none where it had to."""
        if not self._task.verifier:
            return self._rewards.verdict()
        return await grade(self._grader, self._task, final_answer=self._answer, conversation=self._conversation, tools=self)

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any:
        """For the verifier: the text that a tool gives. Raises `LookupError` if the call is refused."""
        result = await self._call(name, arguments)
        if not result.ok:
            raise LookupError(result.error)
        return describe_blocks(result.output.blocks)

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("this environment has no database")

    def _require_session(self) -> OrsSession:
        if self._session is None:
            raise EnvironmentFailed("the ORS session was never opened, or is closed")
        return self._session

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._server.close_session(session)

    @property
    def held(self) -> str:
        return f"{self._session.id} {self._server.address.url}" if self._session is not None else ""

    async def release(self, task: Task, held: str) -> None:
        sid, _, url = held.partition(" ")
        if url == self._server.address.url:
            await self._server.delete_session(sid)
