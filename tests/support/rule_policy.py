"""A policy of rules that talks text: a template of one token per byte, an engine that says what the prompt's world asks for.

A prompt names its world as ``WORLD=name``, or is of the world ``""``; `LINES` has what is said there, turn by turn, the last
line over and over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

import anyio

from fleetbus.core.text.tool_formats import HERMES, ParsedResponse, parse_response
from fleetbus_schemas import ChatMessage, SegmentReason, ToolSpec, VersionSpan
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler

STOP = 1
FIRST_BYTE = 2
_WORLD = re.compile(r"WORLD=(\w+)")


def format_tool_call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


LINES: dict[str, tuple[str, ...]] = {
    "warehouse": (format_tool_call("find_item", name="bolt"), "42 <done>"),
    "shop": (format_tool_call("price", name="ink"), "9 <done>"),
    "echo": ("hello",),
    "tools": (format_tool_call("add", a=1, b=1), format_tool_call("add", a=2, b=3)),
    "climb": ("up",),
    "lake": ("down", "down", "right", "down", "right", "right"),
}


class RuleTemplate:
    """One token per UTF-8 byte."""

    stop_ids: frozenset[int] = frozenset({STOP})
    renders_history = False

    def encode_conversation(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        return self.encode_prompt(messages, tools)

    def explain_rendering(self, conversation: Sequence[ChatMessage], rendered: Sequence[int]) -> SegmentReason:
        return "history_edited"

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        return self.encode_continuation((), messages)

    def encode_continuation(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        return [FIRST_BYTE + byte for message in messages for byte in str(message.content).encode()]

    def decode_text(self, ids: Sequence[int]) -> str:
        return bytes(one - FIRST_BYTE for one in ids if one >= FIRST_BYTE).decode("utf-8", "replace")

    def parse_text(self, text: str, tools: Sequence[ToolSpec], *, calls_before: int = 0) -> ParsedResponse:
        return parse_response(text, HERMES, tools)

    def token_to_id(self, token: str) -> int | None:
        return None


class RuleSampler(ScriptedSampler):
    """Says `LINES`, each after ``seconds``. ``hold`` may give an event to wait for before a turn is said: by world and turn, 0
    first."""

    def __init__(
        self,
        lines: Mapping[str, Sequence[str]] | None = None,
        *,
        hold: Callable[[str, int], anyio.Event | None] = lambda world, turn: None,
        seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self._seconds = seconds
        self._lines = LINES | dict(lines or {})
        self._hold = hold

    async def generate(self, request: GenerationRequest) -> Generation:
        history = RuleTemplate().decode_text(request.ids)
        found = _WORLD.search(history)
        world = found[1] if found else ""
        assert world in self._lines, history
        turn = sum(one == STOP for one in request.ids)
        await anyio.sleep(self._seconds)
        event = self._hold(world, turn)
        if event is not None:
            await event.wait()
        lines = self._lines[world]
        said = lines[min(turn, len(lines) - 1)]
        ids = [*(FIRST_BYTE + byte for byte in said.encode()[: request.max_tokens - 1]), STOP]
        span = VersionSpan(version=self.version, start=0, stop=len(ids))
        return Generation(ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", versions=(span,))
