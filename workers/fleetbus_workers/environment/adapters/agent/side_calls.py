"""Calls of an agent beside its task, told apart by their shape: a title for the chat, a probe, a check of the quota. Pure.

They are answered as all calls are, but not trained: the reward says nothing of them. Above it is `Conversations`, which knows
every line of a session, that is, a conversation from its beginning to its last turn. Nothing is judged before the episode has
ended. See docs/decisions/0191.
"""

from collections.abc import Sequence

import msgspec

from fleetbus_schemas import ChatMessage, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects.formats import tells_format
from fleetbus_workers.environment.adapters.agent.paths import identify

SMALL_TOKENS = 64
"""An answer of at most so many tokens is that of a probe, where the agent's own line works with tools."""


class Line(msgspec.Struct, kw_only=True):
    """The shape of one line. ``system``: the identities of the system messages of its first question; ``is_fresh``: nothing
    of an assistant's or a tool's is in it; ``max_tokens``: what that call asked for at most, None if it did not say or it is
    not known any more; ``turns``: by number in the episode."""

    system: tuple[bytes, ...] = ()
    has_tools: bool = False
    is_fresh: bool = True
    max_tokens: int | None = None
    turns: list[int] = []


def describe_line(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], max_tokens: int | None) -> Line:
    """The shape of a line that begins with this call."""
    return Line(
        system=tuple(identify(message) for message in messages if message.role == "system" and not tells_format(message)),
        has_tools=bool(tools),
        is_fresh=not any(message.role in ("assistant", "tool") for message in messages),
        max_tokens=max_tokens,
    )


def find_side_turns(lines: Sequence[Line]) -> list[int]:
    """The turns of side calls. Where some line has tools, a side call is a line without any that begins afresh, is over after
    one turn, and either has a system prompt that no line with tools has or asks for few tokens."""
    prompts = {line.system for line in lines if line.has_tools}
    return sorted(turn for line in lines if prompts and _is_side_call(line, prompts) for turn in line.turns)


def _is_side_call(line: Line, prompts: set[tuple[bytes, ...]]) -> bool:
    if line.has_tools or not line.is_fresh or len(line.turns) != 1:
        return False
    return is_probe(line) or line.system not in prompts


def is_probe(line: Line) -> bool:
    """True for one question that leaves no room for an answer, as to see that the model answers at all."""
    is_small = line.max_tokens is not None and line.max_tokens <= SMALL_TOKENS
    return is_small and not line.has_tools and line.is_fresh and len(line.turns) == 1
