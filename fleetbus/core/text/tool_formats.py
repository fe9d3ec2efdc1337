# ruff: noqa: RUF001 - DeepSeek writes its marks with full-width bars
"""The formats in which models write tool calls: one table by name, each read by its own parser. Pure, and nothing here raises.

Which format a model writes is found out from its chat template (`fleetbus_workers.inference.tool_support`), never from its
name. A parser finds the calls of a text in order, and for each thing that looks like a call and is none says what is wrong
with it. Arguments that a format writes as bare text become what the tool's JSON Schema says they are.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from fleetbus.core.text.reasoning import split_reasoning
from fleetbus.core.text.tool_calls import MAX_CALLS, CallBlock, build_call, find_tagged_calls, read_json
from fleetbus_schemas import ToolCall, ToolSpec

FindCalls = Callable[[str, Sequence[ToolSpec]], Iterator[CallBlock]]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write tool calls. ``example`` shows it; ``models`` are families that write it. ``call_id`` matches the ids
    that the format's templates accept, if they accept only some: then the id that the model wrote is its call's."""

    name: str
    models: str
    example: str
    find_calls: FindCalls
    call_id: str = ""


class ParsedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response in its parts: the ``reasoning``, the ``content`` without calls, the calls in order, and one line for each
    thing that looked like a call and was none."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


def parse_response(
    text: str, tool_format: ToolFormat, tools: Sequence[ToolSpec] = (), *, reasoning: tuple[str, str] | None = None
) -> ParsedResponse:
    """``text`` in its parts; ``reasoning`` are the marks around the model's reasoning. No call is looked for in reasoning."""
    thought, said = split_reasoning(text, reasoning) if reasoning is not None else ("", text)
    blocks = list(islice(tool_format.find_calls(said, tools), MAX_CALLS))
    kept, position = [], 0
    for block in blocks:
        kept.append(said[position : block.start])
        position = block.stop
    kept.append(said[position:])
    return ParsedResponse(
        reasoning=thought,
        content="".join(kept).strip(),
        calls=tuple(block.call for block in blocks if block.call is not None),
        errors=tuple(block.error for block in blocks if block.call is None),
    )


def number_calls(parsed: ParsedResponse, tool_format: ToolFormat, calls_before: int) -> ParsedResponse:
    """The same with an id for each call: the model's own where its template accepts it, else one by the call's number."""
    calls: list[ToolCall] = []
    for number, call in enumerate(parsed.calls, calls_before):
        own = bool(tool_format.call_id and re.fullmatch(tool_format.call_id, call.id))
        taken = own and any(call.id == earlier.id for earlier in calls)
        calls.append(call if own and not taken else msgspec.structs.replace(call, id=build_call_id(number)))
    return msgspec.structs.replace(parsed, calls=tuple(calls))


MAX_CALL_NUMBER = 99_999


def build_call_id(number: int) -> str:
    """The id of an episode's call by its number, in nine letters and digits: what the strictest template takes."""
    return f"call{min(number, MAX_CALL_NUMBER):05d}"


def read_call_number(call_id: str) -> int:
    """The number in an id that `build_call_id` made, or a model that counts its calls; 0 for any other id."""
    found = re.fullmatch(r"(?:call|functions\..+:)(\d{1,5})", call_id, re.ASCII)
    return int(found[1]) if found else 0


def _find_json_calls(text: str, _: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    return find_tagged_calls(text)


def _find_bodies(text: str, opening: str, closing: str) -> Iterator[tuple[int, int, str]]:
    """Begin, end and content of each stretch from ``opening`` to ``closing``, or to the next one."""
    start = text.find(opening)
    while start >= 0:
        begin = start + len(opening)
        following = text.find(opening, begin)
        limit = text.find(closing, begin, following if following >= 0 else len(text))
        stop = limit + len(closing)
        if limit < 0:
            limit = stop = following if following >= 0 else len(text)
        yield start, stop, text[begin:limit]
        start = text.find(opening, stop)


_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]*)>\n?(.*?)(?:\n?</parameter>|\n(?=<parameter=)|\Z)", re.DOTALL
)  # fmt: skip
_KEY_AND_VALUE = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)


def _find_function_calls(text: str, tools: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    for start, stop, body in _find_bodies(text, "<tool_call>", "</tool_call>"):
        head, opened, rest = body.partition("<function=")
        name, closed, inside = rest.partition(">")
        if not opened or not closed or head.strip():
            yield CallBlock(start, stop, None, "a tool call needs <function=NAME> and </function>")
        else:
            yield _build_text_call(start, stop, name, inside.rstrip().removesuffix("</function>"), _PARAMETER, tools)


def _find_keyed_calls(text: str, tools: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    for start, stop, body in _find_bodies(text, "<tool_call>", "</tool_call>"):
        name = body.partition("<arg_key>")[0]
        yield _build_text_call(start, stop, name, body[len(name) :], _KEY_AND_VALUE, tools)


def _build_text_call(
    start: int, stop: int, name: str, body: str, pair: re.Pattern[str], tools: Sequence[ToolSpec]
) -> CallBlock:
    """A call whose arguments are texts, one by one in ``body``."""
    properties = _get_properties(name.strip(), tools)
    arguments: dict[str, object] = {}
    position = 0
    while (found := pair.match(body, position)) is not None:
        key = found[1].strip()
        arguments[key] = _read_argument(found[2], properties.get(key))
        position = found.end()
    if len(name.split()) > 1:
        return CallBlock(start, stop, None, f"this is no name of a tool: {name.strip()[:80]}")
    if rest := body[position:].strip():
        return CallBlock(start, stop, None, f"these are no arguments: {rest[:80]}")
    return _build_block(start, stop, {"name": name, "arguments": arguments})


def _get_properties(name: str, tools: Sequence[ToolSpec]) -> Mapping[str, object]:
    parameters = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _read_argument(text: str, schema: object) -> object:
    """``text`` as the type that the schema names: as it stands if that is a string, else as JSON if it can be read so."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and not _is_null(text, kinds)):
        return text
    body = text.strip()
    if kinds == "boolean" and body in ("True", "False"):  # templates that print values as Python does
        return body == "True"
    if body == "None":
        return None
    value, stop, error = read_json(body, 0, 0)
    return text if error or body[stop:].strip() else value


def _is_null(text: str, kinds: Sequence[object]) -> bool:
    return "null" in kinds and text.strip() in ("null", "None")


_BARE = re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?=\{)")
_BETWEEN_BARE = re.compile(r"\s*;?\s*(?:<\|python_tag\|>\s*)?(?=\{)")
_LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:name|function|parameters|type)"')


def _find_bare_calls(text: str, _: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    """JSON objects that are all of the response. An object without a name is an answer in JSON, not a call."""
    opening = _BARE.match(text)
    while opening is not None:
        value, stop, error = read_json(text, opening.end(), len(text))
        if error:
            if _LOOKS_LIKE_CALL.match(text, opening.end()):
                yield CallBlock(opening.start(), len(text), None, error)
            return
        if not isinstance(value, dict) or "name" not in value:
            return
        yield _build_block(opening.start(), stop, value)
        opening = _BETWEEN_BARE.match(text, stop)


_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*")
_MISTRAL_NAMED = re.compile(r"([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*([^\[\]{}\s]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _find_mistral_calls(text: str, _: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    """A list of JSON objects after one mark, or a name and its JSON arguments after a mark each."""
    opening = _MISTRAL.search(text)
    while opening is not None:
        following = _MISTRAL.search(text, opening.end())
        limit = following.start() if following else len(text)
        named = _MISTRAL_NAMED.match(text, opening.end())
        value, stop, error = read_json(text, named.end() if named else opening.end(), limit)
        if error:
            yield CallBlock(opening.start(), limit, None, error)
        elif named:
            yield _build_block(opening.start(), stop, {"name": named[1], "id": named[2], "arguments": value})
        else:
            yield from _split_list(opening.start(), stop, value)
        opening = _MISTRAL.search(text, max(stop, opening.end()))


def _find_deepseek_calls(text: str, tools: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    """V3.1: name, separator, JSON. V3 and R1: ``function``, separator, name, and JSON in a fence."""
    for start, stop, body in _find_bodies(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        name, separator, arguments = body.partition("<｜tool▁sep｜>")
        if name.strip() == "function":
            name, _, fenced = arguments.partition("```")
            arguments = fenced.strip().removeprefix("json").removesuffix("```")
        yield _build_json_call(
            text, start, stop, name if separator else "", arguments, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
        )


def _find_kimi_calls(text: str, _: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    for start, stop, body in _find_bodies(text, "<|tool_call_begin|>", "<|tool_call_end|>"):
        head, separator, arguments = body.partition("<|tool_call_argument_begin|>")
        call_id = head.strip() if separator else ""
        name = re.sub(r":\d+$", "", call_id).removeprefix("functions.")
        marks = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        block = _build_json_call(text, start, stop, name, arguments, *marks)
        if block.call is not None:
            block = msgspec.structs.replace(block, call=msgspec.structs.replace(block.call, id=call_id))
        yield block


_COMMAND = re.compile(r"<\|START_ACTION\|>\s*|Action:\s*```json\s*")
_COMMAND_END = re.compile(r"\s*(?:<\|END_ACTION\|>|```)")


def _find_command_calls(text: str, _: Sequence[ToolSpec]) -> Iterator[CallBlock]:
    opening = _COMMAND.search(text)
    while opening is not None:
        closing = _COMMAND_END.search(text, opening.end())
        value, stop, error = read_json(text, opening.end(), closing.start() if closing else len(text))
        closed = _COMMAND_END.match(text, stop)
        stop = closed.end() if closed else stop
        if error:
            yield CallBlock(opening.start(), stop, None, error)
        else:
            yield from _split_list(opening.start(), stop, value)
        opening = _COMMAND.search(text, max(stop, opening.end()))


def _split_list(start: int, stop: int, value: object) -> Iterator[CallBlock]:
    """A block per item of a list of calls; the first has the text, the others have none of it."""
    items = value if isinstance(value, list) else [value]
    if not items:
        yield CallBlock(start, stop, None, "the list of tool calls is empty")
    for number, item in enumerate(items):
        yield _build_block(stop if number else start, stop, item)


def _build_json_call(text: str, start: int, stop: int, name: str, body: str, first: str, last: str) -> CallBlock:
    """A call of ``name`` with the JSON arguments in ``body``; the marks around all calls belong to the first and the last."""
    start -= len(first) if text.endswith(first, 0, start) else 0
    stop += len(last) if text.startswith(last, stop) else 0
    value, end, error = read_json(body, len(body) - len(body.lstrip()), len(body))
    if not error and body[end:].strip():
        error = f"this follows the arguments: {body[end:].strip()[:80]}"
    if error and name.strip():
        return CallBlock(start, stop, None, error)
    return _build_block(start, stop, {"name": name, "arguments": value})


def _build_block(start: int, stop: int, value: object) -> CallBlock:
    if isinstance(value, dict) and "tool_name" in value:
        value = value | {"name": value["tool_name"]}
    try:
        call = build_call(value)
        own_id = value.get("id") if isinstance(value, dict) else None
        return CallBlock(start, stop, msgspec.structs.replace(call, id=own_id) if isinstance(own_id, str) else call)
    except ValueError as problem:
        return CallBlock(start, stop, None, str(problem))


HERMES = ToolFormat(
    name="hermes",
    models="Hermes, Qwen2.5, Qwen3; fleetbus's own prompts",
    example='<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    find_calls=_find_json_calls,
)
"""The format that the prompts of `fleetbus.core.text.prompts` describe."""

TOOL_FORMATS = (
    HERMES,
    ToolFormat(
        name="qwen3-coder",
        models="Qwen3-Coder, Qwen3.5, Nemotron 3",
        example="<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
        find_calls=_find_function_calls,
    ),
    ToolFormat(
        name="glm",
        models="GLM-4.5 to GLM-5",
        example="<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
        find_calls=_find_keyed_calls,
    ),
    ToolFormat(
        name="llama",
        models="Llama 3.1 to 3.3",
        example='{"name": "f", "parameters": {"x": 1}}',
        find_calls=_find_bare_calls,
    ),
    ToolFormat(
        name="mistral",
        models="Mistral, Ministral, Devstral, Magistral",
        example='[TOOL_CALLS]f[ARGS]{"x": 1} or [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
        find_calls=_find_mistral_calls,
        call_id=r"[A-Za-z0-9]{9}",
    ),
    ToolFormat(
        name="deepseek",
        models="DeepSeek V3, R1, V3.1",
        example='<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>',
        find_calls=_find_deepseek_calls,
    ),
    ToolFormat(
        name="kimi",
        models="Kimi K2",
        example='<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>',
        find_calls=_find_kimi_calls,
        call_id=r"functions\.[\w.-]{1,64}:\d{1,5}",
    ),
    ToolFormat(
        name="command",
        models="Command R, R+, R7B, A",
        example='<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>',
        find_calls=_find_command_calls,
    ),
)
"""Every format, the more particular of two that read the same text first."""
