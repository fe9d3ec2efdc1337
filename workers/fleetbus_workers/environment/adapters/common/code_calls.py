"""What a response wants run, where the one tool takes source text: its first call, or its first fenced block. Pure."""

from __future__ import annotations

import re

from fleetbus.core.prompts import format_error, format_further_calls, format_unknown_tool
from fleetbus.core.tool_calls import parse_tool_calls
from fleetbus_schemas import Action, ToolSpec


def extract_source(action: Action, tool: ToolSpec, fenced: re.Pattern[str], missing: str) -> tuple[str | None, str, str]:
    """The only argument of the first call of ``tool``, or the first block that ``fenced`` finds; the message if there is none,
    ``missing`` where nothing was tried; the notice about what is not run."""
    (argument,) = tool.parameters["required"]
    calls = action.tool_calls or parse_tool_calls(action.text).calls
    if calls:
        more = format_further_calls(len(calls) - 1) if len(calls) > 1 else ""
        if calls[0].name != tool.name:
            return None, format_unknown_tool(calls[0].name, (tool,)), more
        source = calls[0].arguments.get(argument)
        if not isinstance(source, str) or "\0" in source:
            return None, format_error(f'{tool.name} needs "{argument}", a text'), more
        return source, "", more
    blocks = fenced.findall(action.text)
    if blocks:
        return blocks[0], "", format_further_calls(len(blocks) - 1) if len(blocks) > 1 else ""
    return None, missing, ""
