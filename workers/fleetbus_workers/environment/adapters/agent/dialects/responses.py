"""OpenAI's responses: ``POST /v1/responses``. A call brings its whole input, or continues a response of its session."""

from collections.abc import Iterator
from typing import Any

from fleetbus_schemas import ChatMessage, ToolCall
from fleetbus_workers.environment.adapters.agent.dialects.base import (
    AgentCall,
    Answer,
    Forbidden,
    InvalidCall,
    read_arguments,
    read_limit,
    read_list,
    read_result,
    read_text,
    refuse_fields,
    sort_tools,
    write_arguments,
    write_event,
)
from fleetbus_workers.environment.adapters.agent.dialects.chat_completions import (
    FAILURE_HEAD,
    JSON_FORMATS,
    KEEPALIVE,
    ROLES,
    parse_choice,
    parse_function,
    render_error,
)
from fleetbus_workers.environment.adapters.agent.dialects.formats import Format, read_json_format

__all__ = ["FAILURE_HEAD", "KEEPALIVE", "parse", "render", "render_error", "stream"]

NAMESPACE_END = "."
"""Between a namespace and a tool of it: a function's name has none."""

MESSAGE_PREFIX, CALL_PREFIX = "msg_", "fc_"
"""Begin the ids of items: an answer's id follows, and of a call its number among those of the answer."""

REASONING = "rs_"
"""Begins the ids of items that are no answer's here."""

TEXT_PARTS = ("input_text", "output_text", "text")
UNSAID: dict[str, object] = {
    "background": False,
    "frequency_penalty": 0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 1,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "truncation": "disabled",
}
"""Fields that strict clients require and that say nothing here."""

FORBIDDEN = (
    Forbidden("conversation", (), "conversations are not stored; send the whole input"),
    Forbidden("background", (False,), "responses are not stored"),
)


def parse(body: dict[str, object]) -> AgentCall:
    refuse_fields(body, FORBIDDEN)
    items, instructions = body.get("input"), body.get("instructions")
    messages = [ChatMessage(role="system", content=str(instructions))] if instructions else []
    references: dict[int, tuple[str, ...]] = {}
    if isinstance(items, str):
        messages.append(ChatMessage(role="user", content=items))
    else:
        references = _parse_items(read_list(items, "input"), messages)
    if not messages:
        raise InvalidCall("input is empty")
    own, left_out = sort_tools(_open_namespaces(read_list(body.get("tools"), "tools")), "function", "")
    tools = tuple(map(parse_function, own))
    return AgentCall(
        messages=tuple(messages),
        tools=() if body.get("tool_choice") == "none" else tools,
        formats=(*parse_choice(body.get("tool_choice"), tools), *_parse_format(body.get("text"))),
        left_out=left_out,
        previous=str(body.get("previous_response_id") or ""),
        references=references,
        model=str(body.get("model") or ""),
        stream=body.get("stream") is True,
        max_tokens=read_limit(body.get("max_output_tokens")),
    )


def _open_namespaces(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each of a namespace under a name that begins with it: Codex offers those of its servers so, and runs them."""
    opened: list[dict[str, Any]] = []
    for tool in tools:
        if tool.get("type") != "namespace":
            opened.append(tool)
            continue
        inner = read_list(tool.get("tools"), "tools of a namespace")
        opened += [each | {"name": _join_name(tool.get("name"), each.get("name"))} for each in inner]
    return opened


def _join_name(namespace: object, name: object) -> str:
    """The name that the policy knows a tool by."""
    return f"{namespace}{NAMESPACE_END}{name}" if namespace else str(name or "")


def _split_name(name: str) -> dict[str, str]:
    """The same in the fields of a call."""
    namespace, _, inner = name.rpartition(NAMESPACE_END)
    return {"name": inner, "namespace": namespace} if namespace and inner else {"name": name}


def _parse_format(text: object) -> tuple[Format, ...]:
    wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return ()
    if wanted.get("type") not in JSON_FORMATS:
        raise InvalidCall(f"text.format is of the type {wanted.get('type')!r}; known are text, {', '.join(JSON_FORMATS)}")
    return (read_json_format("text.format", wanted.get("schema")),)


def _parse_items(items: list[dict[str, object]], messages: list[ChatMessage]) -> dict[int, tuple[str, ...]]:
    """Adds to the messages; an assistant's text and the calls after it are one. Returns the items that are only named, by the
    number of the assistant's message that they are (`StoredResponses.expand`)."""
    references: dict[int, tuple[str, ...]] = {}
    for item in items:
        kind = item.get("type", "message")
        if kind == "item_reference":
            _add_reference(str(item.get("id") or ""), messages, references)
            continue
        if kind == "function_call":
            arguments, text = read_arguments(item.get("arguments"))
            call = ToolCall(
                name=_join_name(item.get("namespace"), item.get("name")),
                arguments=arguments,
                id=str(item.get("call_id") or ""),
                arguments_text=text,
            )
            last = messages.pop() if messages and messages[-1].role == "assistant" else ChatMessage(role="assistant")
            messages.append(ChatMessage(role="assistant", content=last.content, tool_calls=(*last.tool_calls, call)))
        elif kind == "function_call_output":
            output = read_result(item.get("output"), TEXT_PARTS, "output")
            messages.append(ChatMessage(role="tool", content=output, tool_call_id=str(item.get("call_id") or "")))
        elif kind == "message":
            role = ROLES.get(str(item.get("role")))
            if role is None or role == "tool":
                raise InvalidCall(f"a message has the role {item.get('role')!r}; known are {', '.join(ROLES)}")
            content = read_text(item.get("content"), TEXT_PARTS, "content")
            messages.append(ChatMessage(role=role, content=content))  # type: ignore[arg-type]
        elif kind != "reasoning":  # an answer's reasoning is not sent out, so what comes back is not the policy's
            raise InvalidCall(f"input has an item of type {kind!r}, which is not supported here")
    return references


def _add_reference(name: str, messages: list[ChatMessage], references: dict[int, tuple[str, ...]]) -> None:
    """One message for the items of one answer."""
    if name.startswith(REASONING):
        return
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    number = sum(message.role == "assistant" for message in messages) - 1
    references[number] = (*references.get(number, ()), name)


def render(answer: Answer, model: str) -> dict[str, Any]:
    return _envelope(answer, model, "incomplete" if answer.stop_reason == "length" else "completed") | {
        "output": _render_items(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def stream(answer: Answer, model: str, *, usage: bool) -> Iterator[bytes]:
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return write_event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    begun = _envelope(answer, model, "in_progress")
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(_render_items(answer)):
        place = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("response.output_item.added", output_index=index, item=item | empty | {"status": "in_progress"})
        if item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            yield event("response.content_part.added", **place, part=part | {"text": ""})
            yield event("response.output_text.delta", **place, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    ended = "response.incomplete" if answer.stop_reason == "length" else "response.completed"
    yield event(ended, response=render(answer, model))


def _render_items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, object]] = []
    if answer.text or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"{MESSAGE_PREFIX}{answer.id or answer.number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for index, call in enumerate(answer.tool_calls):
        items.append(
            {
                "id": f"{CALL_PREFIX}{answer.id or answer.number}_{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                **_split_name(call.name),
                "arguments": write_arguments(call),
            }
        )
    return items


def _envelope(answer: Answer, model: str, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id or answer.number}",
        "object": "response",
        "created_at": answer.created,
        "completed_at": answer.created if status == "completed" else None,
        "status": status,
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": None,
        **UNSAID,
    }
