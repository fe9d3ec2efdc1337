"""Tool calls in the policy's text: `<tool_call>{"name": "...", "arguments": {...}}</tool_call>`. Pure, and it never raises.

Two readings. The default one takes what can be taken: JSON is decoded from the tag on, missing closers are added, usual
aliases are understood, every call is listed. The strict one accepts exactly what Fleet's SkyRL parser accepts, oddities
included, for comparing with policies that were trained there. A caller executes the first call and reports the others.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from fleetbus_schemas import ToolCall

TAGS = ("tool_call", "function_call")
MAX_CALLS = 64
"""Most calls that are read from one text."""
MAX_DEPTH = 64
"""Deepest nesting of arguments."""

_OPENING = re.compile(r"<(tool_call|function_call)>", re.IGNORECASE)
_BEFORE_JSON = re.compile(r"\s*(?:```(?:json)?\s*)?")
_AFTER_JSON = re.compile(r"[\s}\]`]*</(?:tool_call|function_call)>", re.IGNORECASE)
_CLOSING = re.compile(r"</(?:tool_call|function_call)>|<\|", re.IGNORECASE)
_DONE = re.compile(r"<done>|\[done\]", re.IGNORECASE)
_STRUCTURE = re.compile(r'[{}\[\]]|"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""Brackets outside of strings, and whole strings, so that brackets inside them don't count; the last may be cut."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_CLOSERS = 8


class ParsedText(msgspec.Struct, frozen=True, kw_only=True):
    """The calls in a text, in order, and one line for each thing that looked like a call and was none."""

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def call(self) -> ToolCall | None:
        """The call that is executed: the first."""
        return self.calls[0] if self.calls else None


class CallBlock(msgspec.Struct, frozen=True):
    """One stretch ``[start, stop)`` of a text that is a call: the call, or what is wrong with it."""

    start: int
    stop: int
    call: ToolCall | None
    error: str = ""


def parse_tool_calls(text: str, *, strict: bool = False) -> ParsedText:
    """The tool calls in ``text``; ``strict`` reads at most one, as the reference does, without checking its types."""
    if strict:
        call = _parse_strict_call(text)
        return ParsedText(calls=() if call is None else (call,))
    blocks = list(find_tagged_calls(text))
    return ParsedText(
        calls=tuple(block.call for block in blocks if block.call is not None),
        errors=tuple(block.error for block in blocks if block.call is None),
    )


def is_done(text: str) -> bool:
    """True if the text ends the episode: ``<done>`` or ``[done]`` anywhere, in any case."""
    return _DONE.search(text) is not None


def final_answer(text: str) -> str:
    """The text without tool calls and end marks."""
    kept, position = [], 0
    for block in find_tagged_calls(text):
        kept.append(text[position : block.start])
        position = block.stop
    kept.append(text[position:])
    return _DONE.sub("", "".join(kept)).strip()


def find_tagged_calls(text: str) -> Iterator[CallBlock]:
    """The tagged stretches of ``text`` in order, `MAX_CALLS` at most."""
    opening = _OPENING.search(text)
    count = 0
    while opening is not None and count < MAX_CALLS:
        block = _read_block(text, opening.start(), opening.end())
        yield block
        count += 1
        opening = _OPENING.search(text, block.stop)


def _read_block(text: str, start: int, after_tag: int) -> CallBlock:
    skipped = _BEFORE_JSON.match(text, after_tag)
    begin = skipped.end() if skipped else after_tag
    limit, following = _find_extent(text, begin)
    value, stop, error = read_json(text, begin, limit)
    if error:
        return CallBlock(start, following, None, error)
    stop = following if stop == limit else stop
    closing = _AFTER_JSON.match(text, stop)
    if closing:
        stop = closing.end()
    try:
        return CallBlock(start, stop, build_call(value))
    except ValueError as problem:
        return CallBlock(start, stop, None, str(problem))


def read_json(text: str, begin: int, limit: int) -> tuple[object, int, str]:
    """The JSON value at ``begin``, where it ends, and what was wrong with it. One that lacks closing brackets ends at
    ``limit``, wherever its strings do."""
    try:
        value, stop = _decoder.raw_decode(text, begin)
    except (ValueError, RecursionError) as problem:
        balanced = _close_brackets(text[begin:limit].rstrip().rstrip("`"))
        if balanced is not None:
            try:
                return _decoder.decode(balanced), limit, ""
            except (ValueError, RecursionError):
                pass
        return None, limit, f"not JSON: {problem}"
    return value, stop, ""


def _find_extent(text: str, begin: int) -> tuple[int, int]:
    """The end of the body of a block that is no complete JSON, and the place at which reading continues after it."""
    closing = _CLOSING.search(text, begin)
    following = _OPENING.search(text, begin)
    end_of_text = len(text)
    if following is not None and (closing is None or following.start() < closing.start()):
        return following.start(), following.start()
    if closing is None:
        return end_of_text, end_of_text
    return closing.start(), closing.start() if closing.group() == "<|" else closing.end()


def _close_brackets(body: str) -> str | None:
    """``body`` with the brackets that it lacks, or None if a string is cut, nothing is lacking, or too much."""
    pieces: list[str] = []
    closers: list[str] = []
    added = position = 0
    for token in _STRUCTURE.finditer(body):
        character = token.group()
        if character in "{[":
            closers.append("}" if character == "{" else "]")
            if len(closers) > MAX_DEPTH:
                return None
        elif character in "}]":
            while closers and closers[-1] != character:
                pieces += (body[position : token.start()], closers.pop())
                position = token.start()
                added += 1
            if closers:
                closers.pop()
        elif len(character) == 1 or not character.endswith('"'):
            return None
    added += len(closers)
    if not 0 < added <= _MAX_CLOSERS:
        return None
    return "".join((*pieces, body[position:], *reversed(closers)))


def build_call(value: object) -> ToolCall:
    """The call that a JSON value describes. Raises `ValueError` that says what it lacks."""
    if not isinstance(value, dict):
        raise ValueError("a tool call must be a JSON object")
    name = value.get("name") or value.get("tool")
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a tool call needs a name")
    given = (value.get(key) for key in ("arguments", "params", "parameters", "input"))
    arguments: Any = next((candidate for candidate in given if candidate), {})
    if isinstance(arguments, str):
        try:
            arguments = _decoder.decode(arguments)
        except (ValueError, RecursionError):
            raise ValueError("arguments must be a JSON object") from None
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    return ToolCall(name=_replace_surrogates(name.strip()), arguments=_make_portable(arguments, MAX_DEPTH))


def _make_portable(value: object, depth: int) -> Any:
    """``value`` as msgpack can carry it: lone surrogates replaced, nesting bounded (`ValueError` beyond)."""
    if isinstance(value, str):
        return _replace_surrogates(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise ValueError(f"arguments are nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_make_portable(item, depth - 1) for item in value]
    return {_replace_surrogates(key): _make_portable(item, depth - 1) for key, item in value.items()}


def _replace_surrogates(text: str) -> str:
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _parse_integer(digits: str) -> int | float:
    """An integer that fits 64 bits, else a float as most JSON readers make of it; `ValueError` if it exceeds that too."""
    if len(digits) <= 18:
        return int(digits)
    if len(digits) > 300:
        raise ValueError("number out of range")
    value = int(digits)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)


_decoder = json.JSONDecoder(parse_int=_parse_integer)


def _parse_strict_call(text: str) -> ToolCall | None:
    for tag in TAGS:
        value = _parse_strict_value(_find_strict_body(text, tag))
        if not isinstance(value, dict):
            continue
        name = value.get("name") or value.get("tool")
        if name:
            # As in the reference: falsy arguments fall through to `params`, of any type.
            return ToolCall(name=name, arguments=value.get("arguments") or value.get("params", {}))
    return None


def _find_strict_body(text: str, tag: str) -> str:
    """The text between the first opening tag and the first end after it: its closing tag, else ``<|``, else the end."""
    _, opening, rest = text.partition(f"<{tag}>")
    if not opening:
        return ""
    body, closing, _ = rest.partition(f"</{tag}>")
    return (body if closing else rest.partition("<|")[0]).strip()


def _parse_strict_value(body: str) -> object:
    for closers in ("", "}", "}}", "}}}"):
        try:
            return json.loads(body + closers)
        except (ValueError, RecursionError):
            continue
    return None
