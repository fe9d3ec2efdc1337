"""Results of tool calls as messages of role ``tool``, for a policy whose own chat template writes tools."""

import re
from collections.abc import Sequence

import msgspec

from fleetbus.core.text.prompts import format_error, format_further_calls, format_unknown_tool
from fleetbus.core.text.reasoning import remove_reasoning
from fleetbus.core.text.tool_calls import final_answer, parse_tool_calls
from fleetbus_schemas import Action, ChatMessage, Image, Text, ToolCall, ToolSpec
from fleetbus_workers.environment.base import Step

CUT_RESPONSE = format_error("the response was cut at its limit of tokens: answer more briefly")

Content = str | tuple[Text | Image, ...]


def build_tool_messages(action: Action, contents: Sequence[Content]) -> tuple[ChatMessage, ...]:
    """The messages that the policy sees next: one per call in the calls' order, and what was wrong with those that were none,
    at the end of the last message or, where there is none, from the user."""
    problems = [format_error(f"malformed tool call: {problem}") for problem in action.tool_call_errors]
    messages = [_build_result(call, content) for call, content in zip(action.tool_calls, contents, strict=True)]
    if not messages:
        return (ChatMessage(role="user", content="\n".join(problems) or CUT_RESPONSE),)
    if problems:
        last, text = messages[-1].content, "".join(f"\n{problem}" for problem in problems)
        content: Content = last + text if isinstance(last, str) else (*last, Text(text=text))
        messages[-1] = msgspec.structs.replace(messages[-1], content=content)
    return tuple(messages)


def answer_first_call(action: Action, step: Step) -> Step:
    """The same step of an environment that executes one call per response, its message as that call's result."""
    if step.terminated or not step.messages:
        return step
    skipped = [format_error("not executed: one call per response")] * (len(action.tool_calls) - 1)
    return msgspec.structs.replace(step, messages=build_tool_messages(action, [step.messages[0].content, *skipped]))


def is_final_answer(action: Action) -> bool:
    """True if a response asks for nothing more: it has no call, no attempt at one, and an end."""
    return not action.tool_calls and not action.tool_call_errors and action.finish_reason != "length"


def read_final_answer(action: Action) -> str:
    """A response without the reasoning before it."""
    return final_answer(remove_reasoning(action.text))


def _build_result(call: ToolCall, content: Content) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id=call.id, name=call.name)


def extract_source(action: Action, tool: ToolSpec, fenced: re.Pattern[str], missing: str) -> tuple[str | None, str, str]:
    """The only argument of the first call of ``tool``, or the first block that ``fenced`` finds; the message if there is none,
    ``missing`` where nothing was tried; the notice about what is not run."""
    (argument,) = tool.parameters["required"]
    calls = action.tool_calls or parse_tool_calls(action.text).calls
    if calls:
        more = format_further_calls(len(calls) - 1) if len(calls) > 1 else ""
        if calls[0].name != tool.name:
            return None, format_unknown_tool(calls[0].name, (tool,)), more
        source = calls[0].arguments.get(argument)
        if not isinstance(source, str) or "\0" in source:
            return None, format_error(f'{tool.name} needs "{argument}", a text'), more
        return source, "", more
    blocks = fenced.findall(action.text)
    if blocks:
        return blocks[0], "", format_further_calls(len(blocks) - 1) if len(blocks) > 1 else ""
    return None, missing, ""
