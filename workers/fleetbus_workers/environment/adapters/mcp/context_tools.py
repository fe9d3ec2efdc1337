"""Tools with which a policy manages its own context: its size, its messages, the parts cut from outputs, its older turns.

Above it is `McpEnvironment`, which offers them beside a server's own when ``environment.context_tools`` is set. Dropped turns
leave the context in a segment of its own (docs/decisions/0116-episodes-are-trees.md): what is trained on is what was read.
"""

import json
from collections.abc import Sequence
from typing import Any

from fleetbus.core.text.context import read_page, search_lines, search_messages, truncate_output
from fleetbus_schemas import Action, ContextChange, ToolSpec
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.environment.adapters.mcp.connection import ToolResult

MAX_STORED_CHARACTERS = 64 << 20
"""Of all the outputs of one episode; the rest is dropped with a notice."""

LARGE_CHARACTERS = 1 << 20
"""From here on looking through the outputs takes longer than a turn of the event loop should."""

MAX_PAGE_LINES = 500
KEEP_RECENT_TURNS = 5
MOST_TURNS = 1 << 16


def _build_tool(name: str, description: str, required: Sequence[str] = (), **properties: tuple[str, str]) -> ToolSpec:
    fields = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(required)}
    return ToolSpec(name=name, description=description, parameters=parameters)


_PATTERN = ("string", "Plain text to look for, in any case; | between alternatives")
_OUTPUT = ("integer", "Number of the output, as its notice says; the last one that was cut by default")

TOOLS = (
    _build_tool("check_context", "How many turns and tokens were used, and which outputs were cut."),
    _build_tool("search_history", "Search everything that was said in this conversation.", ["pattern"], pattern=_PATTERN),
    _build_tool("search_tool_output", "Search a tool output that was cut.", ["pattern"], pattern=_PATTERN, output=_OUTPUT),
    _build_tool(
        "view_tool_output",
        "Read a tool output that was cut, page by page.",
        page=("integer", "Page, from 1 on"),
        page_size=("integer", "Lines per page, 50 by default"),
        output=_OUTPUT,
    ),
    _build_tool(
        "manage_context",
        "Drop all but the task and the last turns from your context, this one included. Dropped messages can be searched.",
        keep_recent_turns=("integer", "How many turns to keep, 5 by default"),
    ),
)
NAMES = frozenset(tool.name for tool in TOOLS)


class ContextTools:
    """Those of one episode. ``output_chars`` is the longest output that is shown at once."""

    def __init__(self, output_chars: int) -> None:
        self._output_chars = output_chars
        self._outputs: dict[int, str] = {}
        self._characters_left = MAX_STORED_CHARACTERS
        self._change: ContextChange | None = None
        self._is_stepped = False
        """Whether a client drives the environment step by step: the policy's context is the client's then."""
        self.turns = 0
        self.tokens = 0
        """What the context holds, as of the last action."""

    def record_action(self, action: Action) -> None:
        """Count the turn; a context that begins anew holds what it keeps and this turn."""
        self.turns += 1
        self._is_stepped = not action.sampled
        kept = self.tokens if action.origin is None else action.origin.kept
        self.tokens = kept + count_tokens(action.prompt_delta) + count_tokens(action.sampled)

    @property
    def is_large(self) -> bool:
        """True if a call may take tens of milliseconds."""
        return MAX_STORED_CHARACTERS - self._characters_left > LARGE_CHARACTERS

    def shorten(self, text: str) -> str:
        """An output as the policy sees it; what is cut off stays here under a number."""
        if len(text) <= self._output_chars:
            return text
        number = len(self._outputs) + 1
        stored = text if len(text) <= self._characters_left else text[: self._characters_left] + "\n[the rest was not kept]"
        self._outputs[number] = stored
        self._characters_left = max(0, self._characters_left - len(text))
        return truncate_output(text, self._output_chars, number)

    def call(self, name: str, arguments: dict[str, Any], messages: Sequence[tuple[str, str]]) -> ToolResult:
        """Answer a call of one of `TOOLS`; ``messages`` are the conversation so far as role and text."""
        try:
            return ToolResult(content=self._answer(name, arguments, messages)[: self._output_chars])
        except ValueError as error:
            return ToolResult(content=str(error), failed=True)

    def take_change(self) -> ContextChange | None:
        """The change of the context by the calls since this was asked last."""
        change, self._change = self._change, None
        return change

    def _answer(self, name: str, arguments: dict[str, Any], messages: Sequence[tuple[str, str]]) -> str:
        match name:
            case "manage_context":
                turns = min(_get_number(arguments, "keep_recent_turns", KEEP_RECENT_TURNS), MOST_TURNS)
                self._change = ContextChange(keep_turns=turns)
                if self._is_stepped:
                    return f"Your client was asked to keep only the task and the last {turns} turns."
                return f"The context is now the task and its last {turns} turns."
            case "check_context":
                outputs = {str(number): len(text) for number, text in self._outputs.items()}
                state = {"turns": self.turns, "tokens": self.tokens, "messages": len(messages), "cut_outputs": outputs}
                return json.dumps(state)
            case "search_history":
                return search_messages(messages, _get_text(arguments, "pattern"))
            case "search_tool_output":
                return search_lines(self._get_output(arguments), _get_text(arguments, "pattern"))
        page_size = min(_get_number(arguments, "page_size", 50), MAX_PAGE_LINES)
        page = _get_number(arguments, "page", 1)
        return read_page(self._get_output(arguments), page=page, page_size=page_size, limit=self._output_chars)

    def _get_output(self, arguments: dict[str, object]) -> str:
        if not self._outputs:
            raise ValueError("no output was cut so far")
        number = _get_number(arguments, "output", len(self._outputs))
        if number not in self._outputs:
            raise ValueError(f"there is no output {number}: {len(self._outputs)} were truncated so far")
        return self._outputs[number]


def _get_text(arguments: dict[str, object], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text")
    return value


def _get_number(arguments: dict[str, object], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on")
    return value
