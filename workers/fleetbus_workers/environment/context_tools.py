"""Tools with which a policy looks at its own context: how full it is, what was said, what was cut from an output.

Above it is `McpEnvironment`, which offers them beside a server's own when ``environment.context_tools`` is set. No history is
dropped (docs/decisions/0022-no-history-is-dropped.md): what was trained on is what was read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fleetbus.core.context import cut_output, page_of, search_lines, search_messages
from fleetbus_schemas import ToolSpec
from fleetbus_workers.environment.mcp_connection import ToolResult

MAX_KEPT_CHARACTERS = 64 << 20
"""Of all the outputs of one episode; what exceeds it is cut for good, and says so."""

LARGE_CHARACTERS = 1 << 20
"""From here on looking through the outputs takes longer than a turn of the event loop should."""

LARGEST_PAGE = 500


def _tool(name: str, description: str, required: Sequence[str] = (), **properties: tuple[str, str]) -> ToolSpec:
    fields = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(required)}
    return ToolSpec(name=name, description=description, parameters=parameters)


_PATTERN = ("string", "Plain text to look for, in any case; | between alternatives")
_OUTPUT = ("integer", "Number of the output, as its notice says; the last one that was cut by default")

TOOLS = (
    _tool("check_context", "How many turns and tokens were used, and which outputs were cut."),
    _tool("search_history", "Search everything that was said in this conversation.", ["pattern"], pattern=_PATTERN),
    _tool("search_tool_output", "Search a tool output that was cut.", ["pattern"], pattern=_PATTERN, output=_OUTPUT),
    _tool(
        "view_tool_output",
        "Read a tool output that was cut, page by page.",
        page=("integer", "Page, from 1 on"),
        page_size=("integer", "Lines per page, 50 by default"),
        output=_OUTPUT,
    ),
)
NAMES = frozenset(tool.name for tool in TOOLS)


class ContextTools:
    """Those of one episode. ``output_chars`` is the longest output that is shown at once."""

    def __init__(self, output_chars: int) -> None:
        self._output_chars = output_chars
        self._outputs: dict[int, str] = {}
        self._room = MAX_KEPT_CHARACTERS
        self.turns = 0
        self.tokens = 0

    @property
    def is_large(self) -> bool:
        """Whether a call may take tens of milliseconds."""
        return MAX_KEPT_CHARACTERS - self._room > LARGE_CHARACTERS

    def shortened(self, text: str) -> str:
        """An output as the policy sees it; what is cut off stays here under a number."""
        if len(text) <= self._output_chars:
            return text
        number = len(self._outputs) + 1
        kept = text if len(text) <= self._room else text[: self._room] + "\n[the rest was not kept]"
        self._outputs[number] = kept
        self._room = max(0, self._room - len(text))
        return cut_output(text, self._output_chars, number)

    def call(self, name: str, arguments: dict[str, Any], messages: Sequence[tuple[str, str]]) -> ToolResult:
        """Answer a call of one of `TOOLS`; ``messages`` are the conversation so far as role and text."""
        try:
            return ToolResult(content=self._answer(name, arguments, messages)[: self._output_chars])
        except ValueError as error:
            return ToolResult(content=str(error), failed=True)

    def _answer(self, name: str, arguments: dict[str, Any], messages: Sequence[tuple[str, str]]) -> str:
        match name:
            case "check_context":
                outputs = {str(number): len(text) for number, text in self._outputs.items()}
                state = {"turns": self.turns, "tokens": self.tokens, "messages": len(messages), "cut_outputs": outputs}
                return json.dumps(state)
            case "search_history":
                return search_messages(messages, _text(arguments, "pattern"))
            case "search_tool_output":
                return search_lines(self._output(arguments), _text(arguments, "pattern"))
        page_size = min(_number(arguments, "page_size", 50), LARGEST_PAGE)
        page = _number(arguments, "page", 1)
        return page_of(self._output(arguments), page=page, page_size=page_size, limit=self._output_chars)

    def _output(self, arguments: dict[str, Any]) -> str:
        if not self._outputs:
            raise ValueError("no output was cut so far")
        number = _number(arguments, "output", len(self._outputs))
        if number not in self._outputs:
            raise ValueError(f"there is no output {number}: {len(self._outputs)} were cut so far")
        return self._outputs[number]


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text")
    return value


def _number(arguments: dict[str, Any], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on")
    return value
