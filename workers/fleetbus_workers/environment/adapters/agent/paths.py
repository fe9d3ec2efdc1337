"""Finds the earlier turns that a call continues: conversations of one session as paths, compared message by message. Pure.

An agent sends its whole conversation with every call. What it sends back is not always what it was given: arguments are written
anew, reasoning and ids are left out, a system prompt holds a number that changes with every request. Equality is therefore that
of what a message says: role, text, calls by name and JSON value. What the policy sampled is never rendered again.
"""

import hashlib
import json
import re
from collections.abc import Sequence

import msgspec

from fleetbus_schemas import ChatMessage, ToolSpec
from fleetbus_schemas.segment import SegmentReason
from fleetbus_workers.environment.adapters.agent.dialects.base import InvalidCall

NOISE = {
    "claude-code-billing-header": re.compile(r"x-anthropic-billing-header:[^\n]*\n?"),
    "request-hash": re.compile(r"\bcch=[0-9a-f]+;?"),
}
"""Parts of system prompts that change with every request and say nothing to the model, by name."""


TURN_BYTES = 1_000_000
"""Most that a call may add: a message of the log holds a little more."""


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a call: it continues ``segment`` with ``messages``, or begins that segment for a ``reason``."""

    segment: int
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    reason: SegmentReason | None = None


class _Path(msgspec.Struct, kw_only=True):
    """One segment: the identities of its messages, its answers included; ``task`` of them come before any answer."""

    tools: bytes
    messages: list[bytes]
    task: int
    seat: str


class Paths:
    """The segments of one session, in the order in which they began."""

    def __init__(self) -> None:
        self._paths: list[_Path] = []
        self._open: dict[int, list[bytes]] = {}
        """By segment the conversations that were attached and have no answer yet."""
        self._last_said: tuple[Sequence[ChatMessage], list[bytes]] = ((), [])
        self.extended = 0
        self.reasons: dict[str, int] = {}

    def attach(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], seat: str = "") -> Attachment:
        """The longest path of this seat that the conversation begins with, or a new one. Follow it with `add_answer`, before
        the next one that continues it. Raises `InvalidCall`, with nothing changed, for more than a turn can hold."""
        said, offered = self._identify_all(messages), digest_tools(tools)
        segment = self._find_path(said, offered, seat)
        known = 0 if segment is None else len(self._paths[segment].messages)
        check_size(messages[known:], () if segment is not None else tools)
        if segment is not None:
            self.extended += 1
            self._open[segment] = said
            return Attachment(segment=segment, messages=tuple(messages[known:]))
        task = count_task(messages)
        reason = self._explain_new_path(said, offered, task, seat) if self._paths else None
        if reason is not None:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self._paths.append(_Path(tools=offered, messages=[], task=task, seat=seat))
        self._open[len(self._paths) - 1] = said
        return Attachment(segment=len(self._paths) - 1, messages=tuple(messages), tools=tuple(tools), reason=reason)

    def continues_open(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], seat: str = "") -> bool:
        """True if the conversation continues one whose last call has no answer yet: its place is known with that answer."""
        return self._find_path(self._identify_all(messages), digest_tools(tools), seat) in self._open

    def _identify_all(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        """Mostly what was said in the call before, and a little more; calls are compared by what JSON distinguishes, as 1 and
        true."""
        known, identities = self._last_said
        said = [
            identity if not message.tool_calls and message == before else identify(message)
            for message, before, identity in zip(messages, known, identities, strict=False)
        ]
        said += map(identify, messages[len(said) :])
        self._last_said = messages, said
        return said

    def restore(self, attached: Attachment, *, tools: Sequence[ToolSpec], seat: str = "") -> None:
        """Attach again what was attached in an earlier process; ``tools`` are those of its segment."""
        said = [identify(message) for message in attached.messages]
        if attached.segment < len(self._paths):
            self.extended += 1
            self._open[attached.segment] = [*self._paths[attached.segment].messages, *said]
            return
        if attached.reason is not None:
            self.reasons[attached.reason] = self.reasons.get(attached.reason, 0) + 1
        self._paths.append(_Path(tools=digest_tools(tools), messages=[], task=count_task(attached.messages), seat=seat))
        self._open[attached.segment] = said

    def add_answer(self, segment: int, answer: ChatMessage) -> str:
        """The policy's answer to the call that was attached to ``segment``; what that call asked, as `digest_question` names
        it."""
        path, asked = self._paths[segment], self._open.pop(segment)
        path.messages = [*asked, identify(answer)]
        return _name_question(asked, path.tools, path.seat)

    def _find_path(self, said: list[bytes], offered: bytes, seat: str) -> int | None:
        lengths = {
            segment: len(path.messages)
            for segment, path in enumerate(self._paths)
            if path.messages
            and (path.tools, path.seat) == (offered, seat)
            and len(path.messages) < len(said)
            and path.messages == said[: len(path.messages)]
        }
        return max(lengths, key=lambda segment: (lengths[segment], segment)) if lengths else None

    def _explain_new_path(self, said: list[bytes], offered: bytes, task: int, seat: str) -> SegmentReason:
        """The reason why no path continues: what differs from the nearest one. A conversation that has no answer yet edits one
        whose task it has: sub-agents may begin with the same instructions, as those of Codex do."""
        paths = [path for path in reversed(self._paths) if path.seat == seat]
        if not paths:
            return "seat"
        paths = [path for path in paths if path.messages]
        for path in paths:
            same = path.messages == said[: len(path.messages)] and len(path.messages) < len(said)
            if same and path.tools != offered:
                return "tools_changed"
        for path in paths:
            rest = path.messages[1:]
            if rest and path.messages[0] != said[0] and rest == said[1 : len(path.messages)]:
                return "system_changed"
        for path in paths:
            repeated = said == path.messages[: len(said)]  # the same question again is a conversation of its own
            kept = path.task if task == len(said) else 2
            if path.messages[:kept] == said[:kept] and len(path.messages) > 2 and not repeated:
                return "history_edited"
        return "sub_agent"


def count_task(messages: Sequence[ChatMessage]) -> int:
    """The messages before the first answer."""
    return next((place for place, message in enumerate(messages) if message.role == "assistant"), len(messages))


def check_size(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> None:
    """Raise `InvalidCall` if these do not fit into one message of the log."""
    size = len(msgspec.msgpack.encode((messages, tools)))
    if size > TURN_BYTES:
        raise InvalidCall(f"the call has {size} bytes that no earlier call had, and a turn holds {TURN_BYTES}: shorten them")


def identify(message: ChatMessage) -> bytes:
    """The digest of what a message says: conversations are long, and many."""
    text = message.content if isinstance(message.content, str) else msgspec.json.encode(message.content).decode()
    if message.role == "system":
        for noise in NOISE.values():
            text = noise.sub("", text)
    calls = [[call.name, call.arguments_text or call.arguments] for call in message.tool_calls]
    said = [message.role, text.strip(), calls, message.tool_call_id if message.role == "tool" else ""]
    return _digest(json.dumps(said, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def digest_question(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], seat: str = "") -> str:
    """The digest of what a call asks, independent of its bytes."""
    return _name_question([identify(message) for message in messages], digest_tools(tools), seat)


def digest_tools(tools: Sequence[ToolSpec]) -> bytes:
    return _digest(msgspec.json.encode(tools))


def _name_question(said: Sequence[bytes], tools: bytes, seat: str) -> str:
    return _digest(b"".join((tools, seat.encode(), *said))).hex()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
