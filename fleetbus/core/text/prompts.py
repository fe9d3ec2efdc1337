"""Prompts of tool-use episodes: descriptions of the tools, the call format and the end mark. Pure text."""

import json
from collections.abc import Mapping, Sequence
from datetime import date

from fleetbus_schemas import ToolSpec

TOOL_RESULT = "Tool result:\n"
NO_CALL = 'No tool call found. Use <tool_call>{"name": "...", "arguments": {...}}</tool_call> format.'
EXECUTED = "Action executed."


def build_compact_system_prompt(tools: Sequence[ToolSpec]) -> str:
    """The shortest prompt that says everything: one JSON line per tool, the call format, the end mark."""
    lines = [json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters}) for tool in tools]
    return (
        "Complete the task by calling tools.\n# Tools\n"
        + "\n".join(lines)
        + '\n# Format\n<tool_call>{"name": "tool", "arguments": {...}}</tool_call>\nor the final answer followed by <done>.'
    )


def build_fleet_system_prompt(
    tools: Sequence[ToolSpec],
    *,
    today: date,
    env_variables: Mapping[str, object] | None = None,
    modality: str = "tool_use",
) -> str:
    """The long prompt of Fleet tasks, section by section: date, who is logged in, the tools as JSON, format, errors, answers.

    ``modality`` is ``tool_use``, ``computer_use`` or ``browser_use``.
    """
    sections = [
        "You are an agent. Complete the user's task by calling tools.",
        _build_date_section(today),
        _build_context_section(env_variables or {}),
        _BROWSER if modality in ("computer_use", "browser_use") else "",
        "## Available Tools\n" + json.dumps([_build_function(tool) for tool in tools], indent=2, ensure_ascii=False),
        _build_format_section(tools),
        _ERRORS,
        _ANSWERS,
    ]
    return "\n\n".join(section for section in sections if section)


def format_tool_result(result: object) -> str:
    """The policy's view of a result. Text stays as it is, anything else becomes JSON; a result that says that it is an
    error (see `find_result_error`) is shown as one; nothing at all is an acknowledgement."""
    error = find_result_error(result)
    if error is not None:
        return format_error(error)
    if result is None or result in ("", {}, []):
        return EXECUTED
    return TOOL_RESULT + (result if isinstance(result, str) else json.dumps(result, indent=2, ensure_ascii=False, default=str))


def format_error(message: str) -> str:
    """The text that the policy reads after a call that failed."""
    return message if message.lower().startswith("error:") else f"Error: {message or 'the tool failed without a reason'}"


def find_result_error(result: object) -> str | None:
    """The error that a result reports by its shape: text that starts with ``Error:``, or an object with a true ``error``."""
    if isinstance(result, str):
        text = result.strip()
        return text if text[:6].lower() == "error:" else None
    if isinstance(result, Mapping) and result.get("error"):
        return str(result["error"])
    return None


def format_unknown_tool(name: str, tools: Sequence[ToolSpec]) -> str:
    """The text that the policy reads after a call of a tool that does not exist."""
    return format_error(f"unknown tool {json.dumps(name)}. Available tools: {', '.join(tool.name for tool in tools) or 'none'}")


def format_further_calls(count: int) -> str:
    """A line for the end of an observation when a message held ``count`` calls more than the one that was executed."""
    return f"\n({count} further tool call{'s' if count > 1 else ''} not executed: one per message.)"


def truncate_text(text: str, limit_bytes: int) -> str:
    """``text`` as UTF-8 can carry it, if that is at most ``limit_bytes`` long; else its beginning and a notice, together
    within the limit. Lone surrogates become question marks."""
    if text.isascii() and len(text) <= limit_bytes:
        return text
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode()
    notice = f"\n[TRUNCATED - {len(text)} chars total]"
    return encoded[: max(0, limit_bytes - len(notice))].decode("utf-8", "ignore") + notice


def _build_function(tool: ToolSpec) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _build_date_section(today: date) -> str:
    return (
        f"## Current Date\nToday is {today.isoformat()}. "
        f"A date without a year is in the current year ({today.year}) or in the future."
    )


def _build_context_section(variables: Mapping[str, object]) -> str:
    named = {"LOGGED_IN_USER": "Logged in user ID", "LOGGED_IN_NAME": "Logged in as"}
    lines = [f"- {label}: {variables[key]}" for key, label in named.items() if variables.get(key)]
    lines += [f"- {key}: {value}" for key, value in variables.items() if key not in (*named, "CURRENT_DATE")]
    return "## Environment Context\n" + "\n".join(lines) if lines else ""


def _build_format_section(tools: Sequence[ToolSpec]) -> str:
    return (
        f"## Tool Call Format\nThe tools are: {', '.join(tool.name for tool in tools)}. To call one of them, write:\n"
        '<tool_call>{"name": "<tool_name_from_above>", "arguments": {"<parameter>": "<value>"}}</tool_call>'
    )


_BROWSER = (
    "## Browser Interaction Strategy\nAct in small steps: one action, then look at the screenshot, then decide. Never repeat "
    "the same action more than twice; if the page is still loading, wait once. Write <done> when the task is finished."
)
_ERRORS = (
    "## Error Handling\nWhen a call fails, read the error and change what you do: other arguments, or another tool. "
    "Never repeat a call that failed exactly as it was."
)
_ANSWERS = (
    "## Response Format\nEvery response ends with exactly ONE of these: a tool call, or <done>. Give the final answer BEFORE "
    "<done>. Never respond with a message alone, and never offer further help."
)
