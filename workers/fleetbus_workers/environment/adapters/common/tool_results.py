"""Results of tool calls as messages of role ``tool``, for a policy whose own chat template writes tools."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetbus.core.prompts import format_error
from fleetbus.core.reasoning import remove_reasoning
from fleetbus.core.tool_calls import final_answer
from fleetbus_schemas import Action, ChatMessage, Image, Text, ToolCall
from fleetbus_workers.environment.base import Step

CUT_RESPONSE = format_error("the response was cut at its limit of tokens: answer more briefly")

Content = str | tuple[Text | Image, ...]


def build_tool_messages(action: Action, contents: Sequence[Content]) -> tuple[ChatMessage, ...]:
    """What the policy sees next: a message per call in the calls' order, and what was wrong with those that were none, at the
    end of the last message or, where there is none, from the user."""
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
    """Whether a response asks for nothing more: it has no call, no attempt at one, and an end."""
    return not action.tool_calls and not action.tool_call_errors and action.finish_reason != "length"


def read_final_answer(action: Action) -> str:
    """A response without the reasoning before it."""
    return final_answer(remove_reasoning(action.text))


def _build_result(call: ToolCall, content: Content) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id=call.id, name=call.name)
