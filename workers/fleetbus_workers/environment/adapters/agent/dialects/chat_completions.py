"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from collections.abc import Iterator, Sequence
from typing import Any

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects.base import (
    CHANGES_SAMPLING,
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

KEEPALIVE = b": keepalive\n\n"
FAILURE_HEAD = b"event: error\ndata: "
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text",)
JSON_FORMATS = ("json_object", "json_schema")
FORBIDDEN = (
    Forbidden("n", (1,), "one answer per call; ask again for another sample"),
    Forbidden("logit_bias", ({},), CHANGES_SAMPLING),
    Forbidden("functions", ([],), "give tools"),
    Forbidden("audio", (), "only text is supported"),
)


def parse(body: dict[str, object]) -> AgentCall:
    refuse_fields(body, FORBIDDEN)
    messages = tuple(_parse_message(item) for item in read_list(body.get("messages"), "messages"))
    if not messages:
        raise InvalidCall("messages is empty")
    own, left_out = sort_tools(read_list(body.get("tools"), "tools"), "function", "function")
    tools = tuple(parse_function(item.get("function")) for item in own)
    options = body.get("stream_options")
    return AgentCall(
        messages=messages,
        tools=() if body.get("tool_choice") == "none" else tools,
        formats=(*parse_choice(body.get("tool_choice"), tools), *_parse_format(body.get("response_format"))),
        model=str(body.get("model") or ""),
        stream=body.get("stream") is True,
        left_out=left_out,
        stop=read_stops(body.get("stop")),
        max_tokens=read_limit(body.get("max_completion_tokens") or body.get("max_tokens")),
        stream_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def parse_choice(choice: object, tools: Sequence[ToolSpec]) -> tuple[Format, ...]:
    """``tool_choice`` of both of OpenAI's interfaces: their objects differ in where names stand."""
    field = "tool_choice"
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return read_tool_choice(field, tools, forced=True)
    if not isinstance(choice, dict):
        choice = {}
    kind = choice.get("type")
    if kind == "function":
        return read_tool_choice(field, tools, forced=True, names=[_read_name(choice)])
    if kind == "allowed_tools":
        allowed = choice.get(kind, choice)
        names = [_read_name(tool) for tool in read_list(allowed.get("tools"), field)]
        return read_tool_choice(field, tools, forced=allowed.get("mode") == "required", names=names)
    raise InvalidCall(f"{field} is not supported here: it asks for a tool that only its vendor runs, or for none that is known")


def _read_name(tool: Any) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")


def _parse_format(wanted: object) -> tuple[Format, ...]:
    field = "response_format"
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind in (None, "text"):
        return ()
    if kind not in JSON_FORMATS:
        raise InvalidCall(f"{field} is of the type {kind!r}; known are text, {', '.join(JSON_FORMATS)}")
    described = wanted.get("json_schema") if isinstance(wanted, dict) else None
    return (read_json_format(field, described.get("schema") if isinstance(described, dict) else None),)


def parse_function(function: object) -> ToolSpec:
    """A tool from its name, description and the JSON Schema of its arguments."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidCall("tools has to hold functions with names")
    parameters = function.get("parameters")
    return ToolSpec(
        name=function["name"],
        description=str(function.get("description") or ""),
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def _parse_message(item: dict[str, object]) -> ChatMessage:
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise InvalidCall(f"a message has the role {item.get('role')!r}; known are {', '.join(ROLES)}")
    if len(item) == 2 and isinstance(text := item.get("content"), str):
        return ChatMessage(role=role, content=text)  # type: ignore[arg-type]  # most messages, of which calls have many
    calls = []
    for call in read_list(item.get("tool_calls"), "tool_calls"):
        function = call.get("function")
        if not isinstance(function, dict):
            raise InvalidCall("tool_calls has to hold functions")
        arguments, text = read_arguments(function.get("arguments"))
        name, call_id = str(function.get("name") or ""), str(call.get("id") or "")
        calls.append(ToolCall(name=name, arguments=arguments, id=call_id, arguments_text=text))
    return ChatMessage(
        role=role,  # type: ignore[arg-type]
        content=(read_result if role == "tool" else read_text)(item.get("content"), TEXT_PARTS, "content"),
        tool_calls=tuple(calls),
        tool_call_id=str(item.get("tool_call_id") or ""),
        name=str(item.get("name") or "") if role == "tool" else "",
    )


def render(answer: Answer, model: str) -> dict[str, Any]:
    message: dict[str, object] = {"role": "assistant", "content": answer.text or None}
    if answer.tool_calls:
        message["tool_calls"] = [_render_call(call) for call in answer.tool_calls]
    choice = {"index": 0, "message": message, "finish_reason": answer.stop_reason, "logprobs": None}
    return _envelope(answer, model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def stream(answer: Answer, model: str, *, usage: bool) -> Iterator[bytes]:
    head = _envelope(answer, model, "chat.completion.chunk")

    def chunk(delta: dict[str, object], finish: str | None = None) -> bytes:
        return write_event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.text:
        yield chunk({"content": answer.text})
    for index, call in enumerate(answer.tool_calls):
        yield chunk({"tool_calls": [{"index": index, **_render_call(call)}]})
    yield chunk({}, answer.stop_reason)
    if usage:
        yield write_event(head | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def render_error(status: int, message: str, code: str = "") -> dict[str, object]:
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or None}}


def _envelope(answer: Answer, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id or answer.number}", "object": kind, "created": answer.created, "model": model}


def _render_call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write_arguments(call)}}


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.sampled_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.sampled_tokens, "total_tokens": total}
