"""Environments on an OpenEnv 0.10 server: one session per episode, actions by text, by fields, or by tool calls.

Tools of MCP environments are called through `step`, so that rewards and counts stay right. A session that is gone, an
environment that raises and a reply that cannot be read end the episode as ``env_failed``; an action that the schema refuses is
part of the observation. Above it is the session of an environment worker, below it `server`.

A task's ``config``: ``reset`` (arguments of the reset, besides the task's seed), ``action_field`` (the field that takes the
policy's text), ``observation_field`` (the field that is shown), ``reward`` ("sum" of all steps, or the "last" one).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from fleetbus.core.text.prompts import (
    NO_CALL,
    format_error,
    format_further_calls,
    format_tool_result,
    format_unknown_tool,
    truncate_text,
)
from fleetbus.core.text.tool_calls import final_answer, is_done, parse_tool_calls
from fleetbus_schemas import Action, ChatMessage, Task, ToolCall, ToolOutput, ToolSpec
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.action_text import extract_action
from fleetbus_workers.environment.adapters.common.system_prompts import build_system_prompt
from fleetbus_workers.environment.adapters.common.tool_results import (
    answer_first_call,
    build_tool_messages,
    is_final_answer,
    read_final_answer,
)
from fleetbus_workers.environment.adapters.openenv.client import ActionRefused, OpenEnvSession, StepResult
from fleetbus_workers.environment.adapters.openenv.server import OpenEnvServer
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.isolation.verifier.base import Grader, grade

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle

ACT = "act"
"""The tool that represents an action with several fields."""
METHOD_NOT_FOUND, NO_MCP = -32601, "does not support MCP"
"""How a server says that an environment has no tools; any other error of a listing is a failure, not an answer."""
NO_REWARD = "the environment gave no reward, or one that is no number"
"""A server sends NaN and infinity as null."""

_HIDDEN_FIELDS = frozenset({"metadata", "done", "reward"})


def build(context: AdapterContext) -> Factory:
    """Environments on the server at the spec's URL. Raises `UserError` if that is none."""
    server = OpenEnvServer(context.rest)
    return Factory(partial(OpenEnvEnvironment, server, **context.grading_arguments("fleet")), server.run)


class OpenEnvEnvironment:
    """One episode on ``server``. How the policy acts is found out at the reset: tools, one text field, or all fields."""

    replayable = False

    def __init__(
        self,
        server: OpenEnvServer,
        *,
        grader: Grader,
        prompt: PromptStyle = "fleet",
        observation_bytes: int = 32_768,
        today: Callable[[], date] = date.today,
    ) -> None:
        self._server = server
        self._grader = grader
        self._prompt = prompt
        self._observation_bytes = observation_bytes
        self._today = today
        self._task = Task(key="")
        self._session: OpenEnvSession | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._field = ""
        self._is_mcp = False
        self._conversation: list[ChatMessage] = []
        self._rewards: list[float | None] = []
        self._answer: str | None = None

    async def open(self, task: Task) -> None:
        """Get a session; waits while the server is full. Raises `EnvironmentFailed`."""
        self._task = task
        if task.config.get("reward", "sum") not in ("sum", "last"):
            raise EnvironmentFailed(f"task {task.key}: reward must be sum or last, not {task.config['reward']!r}")
        self._session = await self._server.open_session()

    async def reset(self) -> Start:
        session, task = self._require_session(), self._task
        arguments = dict(task.config.get("reset") or {})
        if task.seed is not None:
            arguments.setdefault("seed", task.seed)
        observed = await session.reset(arguments)
        await self._discover_actions(session)
        shown = self._format_observation(observed)
        messages = [ChatMessage(role="user", content="\n\n".join(filter(None, (task.prompt, shown))))]
        system = build_system_prompt(self._prompt, self._tools, self._task, self._today)
        if system:
            messages.insert(0, ChatMessage(role="system", content=system))
        self._conversation = list(messages)
        tools = self._tools if self._prompt == "template" else ()
        return Start(
            messages=tuple(messages),
            tools=tools,
            info=dict(observed.metadata),
            prompted=len(messages) - 1,
            offered=self._tools,
        )

    async def _discover_actions(self, session: OpenEnvSession) -> None:
        """Tools if the environment has them; else the one text field of its action, or all fields as one tool."""
        field = self._task.config.get("action_field")
        if field:
            self._field = str(field)
            return
        listed = await session.mcp("tools/list")
        if "error" not in listed:
            self._is_mcp = True
            self._tools = tuple(_parse_tool(item) for item in listed.get("result", {}).get("tools", ()))
            if not self._tools:
                raise EnvironmentFailed(f"the OpenEnv environment of task {self._task.key} lists no tools")
            return
        error = dict(listed["error"])
        if error.get("code") != METHOD_NOT_FOUND and NO_MCP not in str(error.get("message", "")):
            raise EnvironmentFailed(f"the OpenEnv environment cannot list its tools: {error.get('message')}")
        schema = await self._server.fetch_action_schema()
        self._field = find_text_field(schema)
        if not self._field:
            self._tools = (ToolSpec(name=ACT, description="Act in the environment.", parameters=_drop_metadata(schema)),)

    async def step(self, action: Action) -> Step:
        self._conversation.append(ChatMessage(role="assistant", content=action.text))
        if self._field:
            return await self._step_server({self._field: extract_action(action.text)})
        if self._prompt != "template":
            return await self._step_calls(action, action.tool_calls or parse_tool_calls(action.text).calls)
        if is_final_answer(action):
            self._answer = read_final_answer(action)
            return Step(terminated=True)
        if not action.tool_calls:
            return Step(messages=build_tool_messages(action, ()))
        return answer_first_call(action, await self._step_calls(action, action.tool_calls))

    async def _step_calls(self, action: Action, calls: Sequence[ToolCall]) -> Step:
        done = is_done(action.text)
        if done:
            self._answer = final_answer(action.text)
        if not calls:
            return Step(terminated=True) if done else self._build_step(NO_CALL)
        more = format_further_calls(len(calls) - 1) if len(calls) > 1 else ""
        if all(tool.name != calls[0].name for tool in self._tools):
            return self._build_step(format_unknown_tool(calls[0].name, self._tools), more=more, done=done, calls=1, errors=1)
        return await self._step_server(self._build_payload(calls[0]), more=more, done=done, calls=1)

    def _build_payload(self, call: ToolCall) -> dict[str, object]:
        if self._is_mcp:
            return {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        return call.arguments

    async def _step_server(self, payload: Mapping[str, object], *, more: str = "", done: bool = False, calls: int = 0) -> Step:
        try:
            observed = await self._require_session().step(payload)
        except ActionRefused as refused:
            return self._build_step(
                format_error(f"the action does not fit: {refused}"), more=more, done=done, calls=1, errors=1
            )
        reward = self._compute_step_reward(observed.reward)
        failed = bool(observed.observation.get("error")) if self._is_mcp else False
        truncated = observed.done and observed.metadata.get("truncated") is True
        return self._build_step(
            self._format_observation(observed),
            more=more,
            reward=reward,
            unrewarded=NO_REWARD if observed.reward is None else "",
            done=done or (observed.done and not truncated),
            truncated=truncated,
            calls=calls,
            errors=int(failed),
            info=observed.metadata,
            output=_tool_output(observed.observation, self._observation_bytes) if self._is_mcp else None,
        )

    def _compute_step_reward(self, reward: float | None) -> float:
        """The step's own part of the episode's reward; where each reward stands for all so far, what it has beyond the last."""
        before = (
            next((rewards for rewards in reversed(self._rewards) if rewards is not None), 0.0) if self._last_counts else 0.0
        )
        self._rewards.append(reward)
        return 0.0 if reward is None else reward - before

    @property
    def _last_counts(self) -> bool:
        return bool(self._task.config.get("reward", "sum") == "last")

    def _build_step(
        self,
        text: str,
        *,
        more: str = "",
        reward: float = 0.0,
        unrewarded: str = "",
        done: bool = False,
        truncated: bool = False,
        calls: int = 0,
        errors: int = 0,
        info: Mapping[str, object] | None = None,
        output: ToolOutput | None = None,
    ) -> Step:
        message = ChatMessage(role="user", content=truncate_text(text, self._observation_bytes - len(more)) + more)
        self._conversation.append(message)
        return Step(
            messages=(message,),
            reward=reward,
            unrewarded=unrewarded,
            terminated=done,
            truncated=truncated and not done,
            tool_calls=calls,
            tool_errors=errors,
            info=dict(info or {}),
            output=output,
        )

    def _format_observation(self, observed: StepResult) -> str:
        """An observation as the policy reads it: what a tool gave, the one field of text there is, or everything as JSON."""
        observation = observed.observation
        if "tool_name" in observation and self._is_mcp:
            return _format_tool_observation(observation)
        field = self._task.config.get("observation_field")
        shown = {name: value for name, value in observation.items() if name not in _HIDDEN_FIELDS and value is not None}
        if field:
            shown = {field: observation.get(field, "")}
        if len(shown) == 1:
            (value,) = shown.values()
            if isinstance(value, str):
                return value
        return json.dumps(shown, ensure_ascii=False) if shown else ""

    async def state(self) -> dict[str, Any]:
        return await self._require_session().state()

    async def verify(self) -> Verdict:
        """The task's verifier if it has one, else the rewards of the steps; no verdict if the environment gave none."""
        if self._task.verifier:
            return await grade(self._grader, self._task, final_answer=self._answer, conversation=self._conversation, tools=self)
        rewards = [reward for reward in self._rewards if reward is not None]
        if self._last_counts:
            rewards = rewards[-1:] if self._rewards and self._rewards[-1] is not None else []
        if not rewards:
            return Verdict(reward=None, reason="the environment gave no reward")
        return Verdict(reward=math.fsum(rewards))

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any:
        """For the verifier: past `step`, so that grading counts as no step. Raises `LookupError` if the tool fails."""
        response = await self._require_session().mcp("tools/call", {"name": name, "arguments": arguments})
        result = response.get("result")
        if not isinstance(result, Mapping):
            raise LookupError(str(response.get("error", {}).get("message", "the tool failed")))
        if result.get("is_error"):
            raise LookupError(_format_content(result))
        return result["data"] if result.get("data") is not None else _format_content(result)

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("this environment has no database")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._server.close_session(session)

    def _require_session(self) -> OpenEnvSession:
        if self._session is None:
            raise EnvironmentFailed("the OpenEnv session was never opened, or is closed")
        return self._session


def find_text_field(schema: Mapping[str, Any]) -> str:
    """The field of an action that takes the policy's whole text: its only required one, if that is a string; else none."""
    properties = {name: value for name, value in dict(schema.get("properties") or {}).items() if name != "metadata"}
    required = [name for name in schema.get("required", ()) if name in properties]
    candidates = required or list(properties)
    if len(candidates) == 1 and _is_text(properties[candidates[0]]):
        return str(candidates[0])
    return ""


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string" and not {"enum", "const"} & set(schema)


def _drop_metadata(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = {name: value for name, value in dict(schema.get("properties") or {}).items() if name != "metadata"}
    return {**schema, "properties": properties}


def _parse_tool(item: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(
        name=str(item.get("name", "")),
        description=item.get("description") or "",
        parameters=dict(item.get("inputSchema") or item.get("input_schema") or {}),
    )


def _format_tool_observation(observation: Mapping[str, object]) -> str:
    """A tool's observation: its error, or its result as MCP content, or as it is."""
    error = observation.get("error")
    if error:
        return format_error(str(error.get("message", error)) if isinstance(error, Mapping) else str(error))
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:
        text = _format_content(result)
        return format_error(text) if result.get("is_error") else format_tool_result(text)
    return format_tool_result(result)


def _tool_output(observation: Mapping[str, object], limit: int) -> ToolOutput:
    """The same for clients that are no policy."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        text = str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
        return ToolOutput(text=truncate_text(text, limit), failed=True)
    if not isinstance(result, Mapping) or "content" not in result:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return ToolOutput(text=truncate_text(text, limit), structured=None if isinstance(result, str) else result)
    structured = result.get("structured_content")
    return ToolOutput(
        text=truncate_text(_format_content(result), limit), structured=structured, failed=bool(result.get("is_error"))
    )


def _format_content(result: Mapping[str, Any]) -> str:
    """The texts of a call's result, a word for each block that is none; its structured data where there are no blocks."""
    blocks = [block for block in result.get("content") or () if isinstance(block, Mapping)]
    if not blocks:
        data = result.get("structured_content")
        return "" if data is None else json.dumps(data, ensure_ascii=False)
    return "\n".join(str(block.get("text", f"[{block.get('type')}]")) for block in blocks)
