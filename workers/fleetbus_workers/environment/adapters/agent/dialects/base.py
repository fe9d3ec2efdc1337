"""The common part of the endpoints that agents speak: a call in, an answer out, for every protocol. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects.formats import Format, read_choice

StopReason = Literal["stop", "length", "tool_calls"]


MAX_STOPS = 16
"""Texts that end an answer, per call; further ones are ignored."""


class InvalidCall(Exception):
    """The body is none that this endpoint can train on: HTTP 400, its text says what to change."""

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class AgentCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an agent: the whole conversation and the tools, as every protocol sends them. ``stream``: the answer is
    wanted as server-sent events, with usage at its end if ``stream_usage``. ``max_tokens``: the most that the answer may have,
    None if the call does not say; ``stop``: texts that end it. ``previous``: the id of the response that it continues, all
    else being before that. ``references``: by the number of an assistant's message the ids of items of answers, which it
    begins with and which are not sent again. ``formats``: what is wanted of the answer, which the protocols' messages do not
    say. ``left_out``: the kinds of tools that the policy is not offered, for only their vendor runs them."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    previous: str = ""
    references: dict[int, tuple[str, ...]] = {}
    formats: tuple[Format, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's turn: ``text`` without reasoning and calls. ``number`` counts the answers of a session, from 0; ``id`` is of
    this answer alone among those of all sessions, and ``created`` Unix seconds. ``stopped_by``: the text, of those that the
    call named, which ended it; it is not part of ``text``."""

    number: int
    text: str
    id: str = ""
    created: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason = "stop"
    stopped_by: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0


class Dialect(Protocol):
    """A module of this package: one protocol."""

    def parse(self, body: dict[str, object]) -> AgentCall:
        """The call in a body. Raises `InvalidCall`."""

    def render(self, answer: Answer, model: str) -> dict[str, Any]:
        """The answer as one JSON object."""

    def stream(self, answer: Answer, model: str, *, usage: bool) -> Iterator[bytes]:
        """The answer as server-sent events, the last one included."""

    def render_error(self, status: int, message: str, code: str = "") -> dict[str, object]:
        """An error as this protocol's clients read it."""

    KEEPALIVE: bytes
    """An event that clients skip."""

    FAILURE_HEAD: bytes
    """The start of an event that holds an error; its JSON and an empty line follow."""


class Forbidden(NamedTuple):
    """A field that changes what is sampled, or asks for what a session does not have; these of its values are harmless.
    ``code`` is what clients know the refusal by, where they continue without the field."""

    name: str
    harmless: tuple[Any, ...]
    reason: str
    code: str = ""


CHANGES_SAMPLING = "it changes what is sampled, and the session's own sampling settings are what is trained"


def refuse_fields(body: dict[str, object], forbidden: tuple[Forbidden, ...]) -> None:
    """Raise `InvalidCall` for a field that is there and says more than nothing."""
    for field in forbidden:
        if body.get(field.name) not in (None, *field.harmless):
            raise InvalidCall(f"{field.name} is not supported here: {field.reason}", code=field.code)


def read_tool_choice(
    field: str, tools: Sequence[ToolSpec], *, forced: bool, names: Sequence[object] = ()
) -> tuple[Format, ...]:
    """The format of a choice among ``tools``, of those that are named or of all. Raises `InvalidCall` where it names none."""
    offered = [tool.name for tool in tools]
    wanted = [str(name) for name in names] or offered
    if not forced and wanted == offered:
        return ()
    if not wanted or (unknown := [name for name in wanted if name not in offered]):
        raise InvalidCall(f"{field} names {', '.join(unknown) if wanted else 'a tool'}, and tools has none of that name")
    return (read_choice(field, wanted, forced=forced, is_all=not names),)


def read_list(value: object, name: str) -> list[dict[str, object]]:
    """A list of objects; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise InvalidCall(f"{name} has to be a list of objects")
    return value


def read_limit(value: object) -> int | None:
    """A number of tokens; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def read_stops(value: object) -> tuple[str, ...]:
    """Texts that end an answer: one, or a list of them."""
    listed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(text for text in listed[:MAX_STOPS] if isinstance(text, str) and text)


def read_text(content: Any, kinds: tuple[str, ...], name: str) -> str:
    """The text of a message: a string, nothing, or parts of these ``kinds``."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in read_list(content, name):
        if part.get("type") not in kinds:
            raise InvalidCall(f"{name} has a part of type {part.get('type')!r}; only text is supported here")
        texts.append(str(part.get("text") or ""))
    return "\n".join(texts)


def read_result(content: Any, kinds: tuple[str, ...], name: str) -> str:
    """The text of a tool's result; other parts, as images, are named in their place: an agent cannot choose what its tools
    give, so it would not survive a refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = read_list(content, name)
    return "\n".join(
        str(part.get("text") or "") if part.get("type") in kinds else note_left_out(str(part.get("type"))) for part in parts
    )


def note_left_out(kind: str) -> str:
    """The words in the place of a part that is no text."""
    return f"[{kind} left out: only text is supported here]"


def sort_tools(tools: list[dict[str, Any]], kind: str, default: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The tools of the ``kind`` that an agent runs itself, and the other kinds; a tool without one is of the ``default``."""
    own = [tool for tool in tools if tool.get("type", default) == kind]
    return own, tuple(dict.fromkeys(str(tool.get("type")) for tool in tools if tool.get("type", default) != kind))


def read_arguments(text: Any) -> tuple[dict[str, object], str]:
    """The arguments of an earlier call as an agent sends them back: parsed, or their text if that is no JSON object."""
    if isinstance(text, dict):
        return text, ""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError, TypeError):
        return {}, str(text)
    return (parsed, "") if isinstance(parsed, dict) else ({}, str(text))


def write_arguments(call: ToolCall) -> str:
    """The arguments of a call as JSON text: as the policy wrote them if it wrote JSON."""
    if call.arguments_text:
        try:
            if json.loads(call.arguments_text) == call.arguments:
                return call.arguments_text
        except (ValueError, RecursionError):
            pass
    return json.dumps(call.arguments, ensure_ascii=False)


def write_event(data: dict[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
