"""Google's Gemini: ``POST /v1beta/models/MODEL:generateContent``, and ``:streamGenerateContent`` as server-sent events.

Names of fields are taken in both forms of JSON that Google's servers take, ``systemInstruction`` and ``system_instruction``.
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects.base import (
    AgentCall,
    Answer,
    Forbidden,
    InvalidCall,
    note_left_out,
    read_arguments,
    read_limit,
    read_list,
    read_stops,
    read_tool_choice,
    refuse_fields,
    write_event,
)
from fleetbus_workers.environment.adapters.agent.dialects.formats import Format, read_json_format

KEEPALIVE = b"\n\n"
"""A comment ends the answer for some of these clients; all of them skip empty lines."""

FAILURE_HEAD = b""
"""These clients look for an error beside the events."""

METHODS = {"generateContent": False, "streamGenerateContent": True}
ROLES = {"user": "user", "function": "user", "model": "assistant"}
STOP_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
DATA = {"inlineData", "fileData"}
OUTPUTS = ({"output"}, {"result"})
"""The keys of a tool's result that is a text."""

JSON = "application/json"
MODES = {"MODE_UNSPECIFIED": False, "AUTO": False, "VALIDATED": False, "ANY": True}
"""Whether each forces a call."""

FORBIDDEN = (Forbidden("cachedContent", ("",), "contents are not stored; send all of them"),)
FORBIDDEN_OPTIONS = (
    Forbidden("candidateCount", (1,), "one answer per call; ask again for another sample"),
    Forbidden("responseMimeType", ("text/plain", JSON), "the answer is text, or JSON"),
    Forbidden("responseModalities", ([], ["TEXT"]), "only text is supported"),
)
FORBIDDEN_MODE = (Forbidden("mode", (*MODES, "NONE"), "it is not known"),)


class _Unanswered:
    """The calls so far that have no result, found without looking through them: conversations are long."""

    def __init__(self) -> None:
        self._found_by: defaultdict[tuple[str, str], deque[list[str]]] = defaultdict(deque)
        """By id and by name the ids of calls, in their order; each call's own list is empty once it is answered."""

    def add(self, calls: Iterable[ToolCall]) -> None:
        """Add calls that came after those before."""
        for call in calls:
            left = [call.id]
            self._found_by["id", call.id].append(left)
            self._found_by["name", call.name].append(left)

    def take(self, name: str, call_id: str) -> str:
        """The id of the first call with this id, or without one of this ``name``, which is answered now; ``call_id`` if there
        is none."""
        found = self._found_by["id", call_id] if call_id else self._found_by["name", name]
        while found:
            if left := found.popleft():
                return left.pop()
        return call_id


def parse(body: dict[str, object]) -> AgentCall:
    """``model`` and ``method`` are those of the path."""
    body = _read_object(body, "")
    if body.get("method") not in METHODS:
        raise InvalidCall(f"the method {body.get('method')!r} is not supported here; known are {', '.join(METHODS)}")
    mode = _read_object(_read_object(body, "toolConfig"), "functionCallingConfig")
    options = _read_object(body, "generationConfig")
    for fields, forbidden in ((body, FORBIDDEN), (options, FORBIDDEN_OPTIONS), (mode, FORBIDDEN_MODE)):
        refuse_fields(fields, forbidden)
    messages = list(_parse_contents(body))
    if not messages:
        raise InvalidCall("contents is empty")
    tools = [_read_object(tool, "") for tool in read_list(body.get("tools"), "tools")]
    offered = () if mode.get("mode") == "NONE" else tuple(_parse_tools(tools))
    return AgentCall(
        messages=(*_parse_system(body), *messages),
        tools=offered,
        formats=(*_parse_mode(mode, offered), *_parse_format(options)),
        left_out=tuple(dict.fromkeys(kind for tool in tools for kind in tool if kind != "functionDeclarations")),
        model=str(body.get("model") or ""),
        stream=METHODS[str(body["method"])],
        stop=read_stops(options.get("stopSequences")),
        max_tokens=read_limit(options.get("maxOutputTokens")),
    )


def _parse_mode(mode: dict[str, Any], tools: tuple[ToolSpec, ...]) -> tuple[Format, ...]:
    names = mode.get("allowedFunctionNames") or []
    if mode.get("mode") == "NONE" or not isinstance(names, list):
        return ()
    forced = MODES.get(str(mode.get("mode")), False)
    return read_tool_choice("functionCallingConfig", tools, forced=forced, names=names) if forced or names else ()


def _parse_format(options: dict[str, Any]) -> tuple[Format, ...]:
    schema = options.get("responseJsonSchema") or options.get("responseSchema")
    if schema is None and options.get("responseMimeType") != JSON:
        return ()
    return (read_json_format("responseSchema" if schema else "responseMimeType", schema),)


def _read_object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under this name, none for an empty one, with names in camel case; these ``fields`` for an empty name."""
    value = fields.get(name) if name else fields
    if value is not None and not isinstance(value, dict):
        raise InvalidCall(f"{name} has to be an object")
    return {re.sub("_([a-z])", lambda found: found[1].upper(), key): held for key, held in (value or {}).items()}


def _parse_system(body: dict[str, Any]) -> Iterator[ChatMessage]:
    system = body.get("systemInstruction")
    parts = [{"text": system}] if isinstance(system, str) else _read_object(body, "systemInstruction").get("parts")
    if text := "\n".join(_read_text(_read_object(part, "")) for part in _list_parts(parts)):
        yield ChatMessage(role="system", content=text)


def _parse_contents(body: dict[str, Any]) -> Iterator[ChatMessage]:
    contents = body.get("contents")
    unanswered = _Unanswered()
    for content in [contents] if isinstance(contents, dict) else read_list(contents, "contents"):
        role = ROLES.get(str(content.get("role") or "user"))
        if role is None:
            raise InvalidCall(f"contents has the role {content.get('role')!r}; known are {', '.join(ROLES)}")
        yield from _parse_content(role, _list_parts(content.get("parts")), unanswered)


def _list_parts(parts: object) -> list[dict[str, Any]]:
    """Parts without thoughts: an answer's are not sent out, so what comes back is not the policy's."""
    listed = read_list([parts] if isinstance(parts, dict) else parts, "parts")
    return [part for part in listed if part.get("thought") is not True]


def _parse_content(role: str, parts: list[dict[str, Any]], unanswered: _Unanswered) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own, before what the user says beside them. Data beside a result is the tool's,
    as Gemini CLI sends an image that it read."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    read = [_read_object(part, "") for part in parts]
    has_result = any("functionResponse" in part for part in read)
    for part in read:
        if "functionResponse" in part:
            yield _parse_result(_read_object(part, "functionResponse"), unanswered)
        elif "functionCall" in part:
            called = _read_object(part, "functionCall")
            arguments, text = read_arguments(called.get("args"))
            name, call_id = str(called.get("name") or ""), str(called.get("id") or "")
            calls.append(ToolCall(name=name, arguments=arguments, id=call_id, arguments_text=text))
        elif has_result and DATA & set(part):
            texts.append(note_left_out(", ".join(part)))
        elif set(part) != {"thoughtSignature"}:
            texts.append(_read_text(part))
    unanswered.add(calls)
    if texts or calls:
        text = ("" if role == "assistant" else "\n").join(texts)  # an answer's text comes in pieces
        yield ChatMessage(role=role, content=text, tool_calls=tuple(calls))  # type: ignore[arg-type]


def _read_text(part: dict[str, Any]) -> str:
    if not isinstance(part.get("text"), str):
        raise InvalidCall(f"contents has a part with {', '.join(part) or 'nothing'}; only text is supported here")
    return str(part["text"])


def _parse_result(result: dict[str, Any], unanswered: _Unanswered) -> ChatMessage:
    """The result of a tool; without an id it is that of the first call of its name that has none."""
    name, call_id = str(result.get("name") or ""), str(result.get("id") or "")
    call_id = unanswered.take(name, call_id)
    said = result.get("response")
    (only,) = said.values() if isinstance(said, dict) and set(said) in OUTPUTS else (None,)
    content = only if isinstance(only, str) else json.dumps(said, ensure_ascii=False)
    for part in read_list(result.get("parts"), "parts of a tool result"):
        content += f"\n{note_left_out(', '.join(part))}"
    return ChatMessage(role="tool", content=content, tool_call_id=call_id, name=name)


def _parse_tools(tools: list[dict[str, Any]]) -> Iterator[ToolSpec]:
    for tool in tools:
        for each in read_list(tool.get("functionDeclarations"), "functionDeclarations"):
            declared = _read_object(each, "")
            if not isinstance(declared.get("name"), str):
                raise InvalidCall("tools has to hold functions with names")
            schema = declared.get("parametersJsonSchema") or _write_json_schema(declared.get("parameters"))
            yield ToolSpec(
                name=declared["name"],
                description=str(declared.get("description") or ""),
                parameters=schema if isinstance(schema, dict) else {},
            )


def _write_json_schema(schema: Any) -> Any:
    """Google's own schemas name types in capitals."""
    if isinstance(schema, list):
        return [_write_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kind = {"type": schema["type"].lower()} if isinstance(schema.get("type"), str) else {}
    return {name: _write_json_schema(value) for name, value in schema.items()} | kind


def render(answer: Answer, model: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"text": answer.text}] if answer.text or not answer.tool_calls else []
    parts += [{"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}} for call in answer.tool_calls]
    content = {"role": "model", "parts": parts}
    return {
        "candidates": [{"content": content, "finishReason": STOP_REASONS[answer.stop_reason], "index": 0}],
        "usageMetadata": {
            "promptTokenCount": answer.prompt_tokens,
            "candidatesTokenCount": answer.sampled_tokens,
            "totalTokenCount": answer.prompt_tokens + answer.sampled_tokens,
        },
        "modelVersion": model,
        "responseId": answer.id or str(answer.number),
    }


def stream(answer: Answer, model: str, *, usage: bool) -> Iterator[bytes]:
    """One event: clients keep each as a message of its own, and send them back so."""
    yield write_event(render(answer, model))


def render_error(status: int, message: str, code: str = "") -> dict[str, object]:
    return {"error": {"code": status, "message": message, "status": STATUSES.get(status, "INTERNAL")}}
