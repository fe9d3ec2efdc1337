"""Messages, calls and tools of an ATIF step as those of a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetbus.interchange.atif_format import OBJECT_PATH, Content, Result, Step
from fleetbus_schemas import ChatMessage, Image, Text, ToolCall, ToolSpec


def read_content(content: str | list[Content]) -> str | tuple[Text | Image, ...]:
    """Text, or texts and images in order. Only images of a run's bucket are images: others are named by their path."""
    return content if isinstance(content, str) else tuple(map(_read_part, content))


def _read_part(part: Content) -> Text | Image:
    if part.source is None:
        return Text(text=part.text or "")
    if part.type == "image" and part.source.path.startswith(OBJECT_PATH):
        return Image(object=part.source.path.removeprefix(OBJECT_PATH), media_type=part.source.media_type)
    return Text(text=f"[{part.type} {part.source.path}]")


def read_calls(step: Step) -> tuple[ToolCall, ...]:
    """The calls of an answer; an id that fleetbus made up is left out again."""
    return tuple(
        ToolCall(
            name=call.function_name,
            arguments=call.arguments,
            id=str((call.extra or {}).get("id", call.tool_call_id)),
            arguments_text=str((call.extra or {}).get("arguments_text", "")),
        )
        for call in step.tool_calls or ()
    )


def read_step_message(step: Step) -> ChatMessage:
    """A step that the policy did not sample."""
    extra = step.extra or {}
    content, name = read_content(step.message), str(extra.get("name", ""))
    if step.source == "agent":
        reasoning = step.reasoning_content or str(extra.get("reasoning", ""))
        return ChatMessage(role="assistant", content=content, tool_calls=read_calls(step), reasoning=reasoning)
    if extra.get("role") == "tool":
        return ChatMessage(role="tool", content=content, name=name, tool_call_id=str(extra.get("tool_call_id", "")))
    return ChatMessage(role=step.source, content=content, name=name)


def read_messages_of(step: Step) -> list[ChatMessage]:
    """The results of a step: those of calls are a tool's messages, what the environment said otherwise is a user's."""
    names = {call.tool_call_id: call.function_name for call in step.tool_calls or ()}
    results = step.observation.results if step.observation is not None else []
    return [_read_result(result, names) for result in results if result.content is not None]


def _read_result(result: Result, names: dict[str, str]) -> ChatMessage:
    extra = result.extra or {}
    content, source = read_content(result.content or ""), result.source_call_id
    if (source is None and extra.get("role") != "tool") or extra.get("seen") is False:
        return ChatMessage(role="user", content=content)
    written = extra.get("role") == "tool"
    name = str(extra.get("name", "")) if written else names.get(source or "", "")
    return ChatMessage(role="tool", content=content, name=name, tool_call_id=str(extra.get("tool_call_id", source or "")))


def read_tools(definitions: Sequence[dict[str, Any]] | None) -> tuple[ToolSpec, ...]:
    """Tools as OpenAI's function calling describes them; those without a name are left out."""
    found = []
    for definition in definitions or ():
        function = definition.get("function", definition)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            description = function.get("description")
            found.append(
                ToolSpec(
                    name=name,
                    description=description if isinstance(description, str) else "",
                    parameters=parameters if isinstance(parameters, dict) else {},
                )
            )
    return tuple(found)
