"""Anthropic's messages: ``POST /v1/messages``."""

from collections.abc import Iterator, Sequence
from typing import Any

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.call_ids import ANTHROPIC_PREFIX, PREFIX
from fleetbus_workers.environment.adapters.agent.dialects.base import (
    AgentCall,
    Answer,
    Forbidden,
    InvalidCall,
    read_arguments,
    read_limit,
    read_list,
    read_result,
    read_stops,
    read_text,
    read_tool_choice,
    refuse_fields,
    sort_tools,
    write_arguments,
    write_event,
)
from fleetbus_workers.environment.adapters.agent.dialects.formats import Format, read_json_format

KEEPALIVE = write_event({"type": "ping"}, "ping")
FAILURE_HEAD = b"event: error\ndata: "
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TEXT_PARTS = ("text",)
NOT_SAMPLED = ("thinking", "redacted_thinking")
FORBIDDEN = (
    Forbidden("thread", (), "conversations are not stored; send all messages", "thread_unsupported_request"),
    Forbidden("mcp_servers", ([],), "the agent calls its servers itself"),
)


def parse(body: dict[str, object]) -> AgentCall:
    refuse_fields(body, FORBIDDEN)
    messages = [message for item in read_list(body.get("messages"), "messages") for message in _parse_message(item)]
    if not messages:
        raise InvalidCall("messages is empty")
    if system := read_text(body.get("system"), TEXT_PARTS, "system"):
        messages.insert(0, ChatMessage(role="system", content=system))
    own, left_out = sort_tools(read_list(body.get("tools"), "tools"), "custom", "custom")
    offered = tuple(map(_parse_tool, own))
    kind, choice = _parse_choice(body.get("tool_choice"), offered)
    return AgentCall(
        messages=tuple(messages),
        tools=() if kind == "none" else offered,
        formats=(*choice, *_parse_format(body)),
        model=str(body.get("model") or ""),
        stream=body.get("stream") is True,
        left_out=left_out,
        stop=read_stops(body.get("stop_sequences")),
        max_tokens=read_limit(body.get("max_tokens")),
    )


def _parse_choice(choice: object, tools: Sequence[ToolSpec]) -> tuple[object, tuple[Format, ...]]:
    """Its type, and what it forces."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none"):
        return kind, ()
    if kind not in ("any", "tool"):
        raise InvalidCall(f"tool_choice is of the type {kind!r}; known are auto, any, tool and none")
    names = [choice.get("name")] if isinstance(choice, dict) and kind == "tool" else []
    return kind, read_tool_choice("tool_choice", tools, forced=True, names=names)


def _parse_format(body: dict[str, Any]) -> tuple[Format, ...]:
    """``output_config.format``, and its older name."""
    config = body.get("output_config")
    wanted = (config.get("format") if isinstance(config, dict) else None) or body.get("output_format")
    if wanted is None:
        return ()
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise InvalidCall("output_format has to be of the type json_schema")
    return (read_json_format("output_format", wanted.get("schema")),)


def _parse_tool(tool: dict[str, Any]) -> ToolSpec:
    if not isinstance(tool.get("name"), str):
        raise InvalidCall("tools has to hold tools with names")
    schema = tool.get("input_schema")
    return ToolSpec(
        name=tool["name"],
        description=str(tool.get("description") or ""),
        parameters=schema if isinstance(schema, dict) else {},
    )


def _parse_message(item: dict[str, object]) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own, before what the user says beside them."""
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidCall(f"a message has the role {role!r}; known are user and assistant")
    if isinstance(content, str) or content is None:
        yield ChatMessage(role=role, content=content or "")
        return
    texts: list[str] = []
    calls: list[ToolCall] = []
    for part in read_list(content, "content"):
        kind = part.get("type")
        if kind == "tool_result":
            result = read_result(part.get("content"), TEXT_PARTS, "content of a tool result")
            yield ChatMessage(role="tool", content=result, tool_call_id=str(part.get("tool_use_id") or ""))
        elif kind == "tool_use":
            arguments, text = read_arguments(part.get("input"))
            call_id, name = str(part.get("id") or ""), str(part.get("name") or "")
            calls.append(ToolCall(name=name, arguments=arguments, id=call_id, arguments_text=text))
        elif kind not in NOT_SAMPLED:
            texts.append(read_text([part], TEXT_PARTS, "content"))
    if texts or calls:
        yield ChatMessage(role=role, content="\n".join(texts), tool_calls=tuple(calls))


def render(answer: Answer, model: str) -> dict[str, Any]:
    return _envelope(answer, model) | {
        "content": _render_blocks(answer),
        **_end(answer),
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens},
    }


def stream(answer: Answer, model: str, *, usage: bool) -> Iterator[bytes]:
    begun = _envelope(answer, model) | {"usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0}}
    yield write_event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(_render_blocks(answer)):
        empty: dict[str, Any]
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            call = answer.tool_calls[index - bool(answer.text)]
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": write_arguments(call)}
        start = {"type": "content_block_start", "index": index, "content_block": block | empty}
        yield write_event(start, "content_block_start")
        yield write_event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield write_event({"type": "content_block_stop", "index": index}, "content_block_stop")
    used = {"output_tokens": answer.sampled_tokens}
    yield write_event({"type": "message_delta", "delta": _end(answer), "usage": used}, "message_delta")
    yield write_event({"type": "message_stop"}, "message_stop")


def _end(answer: Answer) -> dict[str, object]:
    reason = "stop_sequence" if answer.stopped_by and answer.stop_reason == "stop" else STOP_REASONS[answer.stop_reason]
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by or None}


def render_error(status: int, message: str, code: str = "") -> dict[str, object]:
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    details = {"details": {"error_code": code}} if code else {}
    return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message, **details}}


def _envelope(answer: Answer, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id or answer.number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _render_blocks(answer: Answer) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = [{"type": "text", "text": answer.text}] if answer.text else []
    for call in answer.tool_calls:
        call_id = call.id.replace(PREFIX, ANTHROPIC_PREFIX, 1) if call.id.startswith(PREFIX) else call.id
        blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": call.arguments})
    return blocks
