"""Tool use over MCP as an environment: prompt with tools, one call per action, results as observations. The default.

Above it is the session of an environment worker; below it one `Connection` per episode and a verifier. What goes wrong with a
call is part of the observation; only a server that is gone ends the episode.
"""

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, Literal

import anyio
import msgspec
import structlog

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.core.text.prompts import (
    NO_CALL,
    TOOL_RESULT,
    build_compact_system_prompt,
    build_fleet_system_prompt,
    format_error,
    format_further_calls,
    format_tool_result,
    format_unknown_tool,
    truncate_text,
)
from fleetbus.core.text.tool_calls import final_answer, is_done, parse_tool_calls
from fleetbus_schemas import Action, ChatMessage, Task, Text, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.common.tool_results import (
    Content,
    build_tool_messages,
    is_final_answer,
    read_final_answer,
)
from fleetbus_workers.environment.adapters.mcp import context_tools
from fleetbus_workers.environment.adapters.mcp.connection import Connection, ToolResult, tool_output
from fleetbus_workers.environment.adapters.mcp.context_tools import ContextTools
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import StoreImage
from fleetbus_workers.environment.isolation.verifier.base import Grader, HasDatabases, grade, to_plain_text

log = structlog.get_logger(__name__)

PromptStyle = Literal["compact", "fleet", "template"]
"""What describes the tools to the policy: a short prompt, Fleet's long one, or the model's own chat template."""


Connect = Callable[[Task], Connection]
"""Makes the connection of an episode; it is opened and closed by the environment."""

FirstCall = Callable[[Task], ToolCall | None]
"""A call to be made before the policy's first turn, as a first look at a screen; what it shows follows the task's prompt."""


class McpEnvironment:
    """One episode with the tools of an MCP server. ``observation_bytes`` bounds each observation's text. Images that tools
    show are stored with ``store_image`` and referenced; without it a placeholder replaces each. With ``output_chars`` the
    policy gets context tools, and outputs longer than that are cut with a way back to the rest.

    With the prompt ``template`` all calls of a response are executed, at most ``parallel_calls`` at a time, and answered in
    order; in a replayable environment one after another. A response without a call is the final answer."""

    def __init__(
        self,
        connect: Connect,
        *,
        grader: Grader,
        prompt: PromptStyle = "fleet",
        observation_bytes: int = 32_768,
        replayable: bool = False,
        today: Callable[[], date] = date.today,
        store_image: StoreImage | None = None,
        first_call: FirstCall = lambda _: None,
        output_chars: int | None = None,
        parallel_calls: int = 1,
    ) -> None:
        self.replayable = replayable
        self._connect = connect
        self._grader = grader
        self._prompt = prompt
        self._observation_bytes = observation_bytes
        self._today = today
        self._store_image = store_image
        self._first_call = first_call
        self._context = None if output_chars is None else ContextTools(output_chars)
        self._parallel_calls = 1 if replayable else parallel_calls
        self._task: Task | None = None
        self._connection: Connection | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._conversation: list[ChatMessage] = []
        self._answer: str | None = None
        self._tool_calls = self._tool_errors = 0

    async def open(self, task: Task) -> None:
        """Connect and read the tools. Raises `EnvironmentFailed` if the server has none."""
        self._task = task
        self._connection = self._connect(task)
        await self._connection.open()
        self._tools = await self._connection.list_tools()
        if not self._tools:
            raise EnvironmentFailed(f"the server of task {task.key} lists no tools")
        if self._context is not None:
            clashing = context_tools.NAMES & {tool.name for tool in self._tools}
            if clashing:
                names = ", ".join(sorted(clashing))
                raise EnvironmentFailed(f"the server has {names} as well: turn environment.context_tools off")
            self._tools += context_tools.TOOLS

    async def reset(self) -> Start:
        assert self._task is not None
        messages = [ChatMessage(role="user", content=await self._build_prompt(self._task))]
        system = self._build_system_prompt(self._task)
        if system:
            messages.insert(0, ChatMessage(role="system", content=system))
        self._conversation = list(messages)
        # Only once: a chat template that is given the tools describes them as well.
        tools = self._tools if self._prompt == "template" else ()
        return Start(messages=tuple(messages), tools=tools, prompted=len(messages) - 1, offered=self._tools)

    async def _build_prompt(self, task: Task) -> Content:
        """The task's prompt, and what the first look shows; a failed look is only a warning."""
        call = self._first_call(task)
        if call is None:
            return task.prompt
        assert self._connection is not None
        result = await self._connection.call_tool(call.name, call.arguments)
        if result.failed:
            log.warning(
                "first tool call failed; continuing without its result", tool=call.name, reason=str(result.content)[:300]
            )
            return task.prompt
        return await self._attach_images(task.prompt, result)

    def _build_system_prompt(self, task: Task) -> str:
        if self._prompt == "template":
            return ""
        if self._prompt == "compact":
            return build_compact_system_prompt(self._tools)
        return build_fleet_system_prompt(
            self._tools, today=self._today(), env_variables=task.env_variables, modality=task.modality
        )

    async def step(self, action: Action) -> Step:
        """Execute the first call of the action, if any; then the episode is over if the action says so."""
        if self._context is not None:
            self._context.record_action(action)
        if self._prompt == "template":
            return await self._step_with_template(action)
        calls = action.tool_calls or parse_tool_calls(action.text).calls
        done = is_done(action.text)
        self._conversation.append(ChatMessage(role="assistant", content=action.text))
        if done:
            self._answer = final_answer(action.text)
        if not calls:
            return Step(terminated=True) if done else self._build_step(NO_CALL)
        if self._context is not None and calls[0].name in context_tools.NAMES:
            return await self._answer_context_call(self._context, calls, done=done)
        result = await self._execute(calls[0])
        self._tool_calls += 1
        self._tool_errors += result.failed
        if result.ends:
            done, self._answer = True, self._answer if result.answer is None else result.answer
        step = self._build_step(await self._attach_images(self._format_result(result, calls), result), done=done)
        output = tool_output(result, self._observation_bytes)
        return Step(messages=step.messages, terminated=done, tool_calls=1, tool_errors=int(result.failed), output=output)

    async def _step_with_template(self, action: Action) -> Step:
        """Execute all calls of the action; without any it is the final answer."""
        calls = action.tool_calls
        self._conversation.append(ChatMessage(role="assistant", content=action.text, tool_calls=calls))
        if is_final_answer(action):
            self._answer = read_final_answer(action)
            return Step(terminated=True)
        results = await self._execute_side_by_side(calls)
        limit = self._observation_bytes // max(len(calls), 1)
        contents = [await self._attach_images(self._format_output(result, limit), result) for result in results]
        messages = build_tool_messages(action, contents)
        self._conversation += messages
        errors = sum(result.failed for result in results)
        self._tool_calls += len(results)
        self._tool_errors += errors
        ended = [result for result in results if result.ends]
        if ended:
            self._answer = next((result.answer for result in ended if result.answer is not None), read_final_answer(action))
        return Step(
            messages=() if ended else messages,
            terminated=bool(ended),
            tool_calls=len(results),
            tool_errors=errors,
            output=tool_output(results[0], self._observation_bytes) if len(results) == 1 else None,
            context=self._context.take_change() if self._context is not None else None,
        )

    async def _execute_side_by_side(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Their results in order. The first server that is gone ends the other calls."""
        if self._parallel_calls == 1:  # tasks of one group begin in any order
            return [await self._execute(call) for call in calls]
        results: dict[int, ToolResult] = {}
        room = anyio.Semaphore(self._parallel_calls)

        async def execute(number: int, call: ToolCall) -> None:
            async with room:
                results[number] = await self._execute(call)

        async with open_first_error_task_group() as group:
            for number, call in enumerate(calls):
                group.start_soon(execute, number, call)
        return [results[number] for number in range(len(calls))]

    def _format_output(self, result: ToolResult, limit: int) -> str:
        """A result as a message of its own, which needs no words around it."""
        text = _format_result_text(result).removeprefix(TOOL_RESULT)
        return truncate_text(self._context.shorten(text) if self._context is not None else text, limit)

    def _format_result(self, result: ToolResult, calls: Sequence[ToolCall]) -> str:
        """The text that the policy reads after the first of ``calls``."""
        text = _format_result_text(result)
        if self._context is not None:
            head = TOOL_RESULT if text.startswith(TOOL_RESULT) else ""
            text = head + self._context.shorten(text.removeprefix(head))
        more = format_further_calls(len(calls) - 1) if len(calls) > 1 else ""
        return truncate_text(text, self._observation_bytes - len(more)) + more

    async def _answer_context_call(self, context: ContextTools, calls: Sequence[ToolCall], *, done: bool) -> Step:
        """A call of a context tool is answered here and counts as none of the server's."""
        result = await self._call_context_tool(context, calls[0])
        step = self._build_step(self._format_result(result, calls), done=done)
        return msgspec.structs.replace(step, context=context.take_change())

    async def _call_context_tool(self, context: ContextTools, call: ToolCall) -> ToolResult:
        messages = [(message.role, to_plain_text(message.content)) for message in self._conversation]
        if context.is_large:  # looking through megabytes would hold up the other episodes
            return await anyio.to_thread.run_sync(context.call, call.name, call.arguments, messages, abandon_on_cancel=True)
        return context.call(call.name, call.arguments, messages)

    async def _execute(self, call: ToolCall) -> ToolResult:
        """An unknown tool is answered here, without a call."""
        assert self._connection is not None
        if self._context is not None and call.name in context_tools.NAMES:
            return await self._call_context_tool(self._context, call)
        if all(tool.name != call.name for tool in self._tools):
            return ToolResult(content=format_unknown_tool(call.name, self._tools), failed=True)
        return await self._connection.call_tool(call.name, call.arguments)

    async def _attach_images(self, text: str, result: ToolResult) -> Content:
        if not result.images or self._store_image is None:
            return text
        return (Text(text=text), *[await self._store_image(picture) for picture in result.images])

    def _build_step(self, content: Content, *, done: bool = False) -> Step:
        message = ChatMessage(role="user", content=content)
        self._conversation.append(message)
        return Step(messages=() if done else (message,), terminated=done)

    async def state(self) -> dict[str, Any]:
        return {
            "task": self._task.key if self._task else "",
            "messages": len(self._conversation),
            "tool_calls": self._tool_calls,
            "tool_errors": self._tool_errors,
            "answer": self._answer,
        }

    async def verify(self) -> Verdict:
        return await grade(self._grader, self._task, final_answer=self._answer, conversation=self._conversation, tools=self)

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any:
        """For the verifier: what a tool gives; raises `LookupError` with its text if it fails."""
        assert self._connection is not None
        result = await self._connection.call_tool(name, arguments)
        if result.failed:
            raise LookupError(str(result.content))
        return result.content

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        """For the verifier: rows from the database behind the server."""
        assert self._connection is not None
        return await self._connection.query(sql, params)

    async def database(self, name: str, sql: str, params: Sequence[object]) -> dict[str, Any]:
        """For the verifier: columns and rows from one of the databases behind the server, by its name."""
        if not isinstance(self._connection, HasDatabases):
            raise LookupError("this environment has no databases with names: use env.query")
        return await self._connection.database(name, sql, params)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _format_result_text(result: ToolResult) -> str:
    if not result.failed:
        return format_tool_result(result.content)
    return format_error(result.content.strip()) if isinstance(result.content, str) else format_tool_result(result.content)
