"""Texts that the policy reads: the two system prompts and the texts of observations."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.core.text.prompts import (
    NO_CALL,
    build_compact_system_prompt,
    build_fleet_system_prompt,
    format_error,
    format_further_calls,
    format_tool_result,
    format_unknown_tool,
    truncate_text,
)
from fleetbus_schemas import ToolSpec

TOOLS = (
    ToolSpec(name="find", description="Find it.", parameters={"type": "object", "properties": {"name": {"type": "string"}}}),
    ToolSpec(name="read"),
)
TODAY = date(2026, 5, 18)


def test_the_compact_prompt_is_the_one_that_the_starter_policy_was_trained_on() -> None:
    assert build_compact_system_prompt(TOOLS[:1]) == (
        'Complete the task by calling tools.\n# Tools\n{"name": "find", "description": "Find it.", "parameters": {"type": '
        '"object", "properties": {"name": {"type": "string"}}}}\n# Format\n<tool_call>{"name": "tool", "arguments": {...}}'
        "</tool_call>\nor the final answer followed by <done>."
    )


def test_the_fleet_prompt_has_its_sections_in_order() -> None:
    prompt = build_fleet_system_prompt(
        TOOLS, today=TODAY, env_variables={"LOGGED_IN_USER": "u7", "REGION": "EU"}, modality="browser_use"
    )
    headings = [line for line in prompt.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Current Date",
        "## Environment Context",
        "## Browser Interaction Strategy",
        "## Available Tools",
        "## Tool Call Format",
        "## Error Handling",
        "## Response Format",
    ]
    assert "2026-05-18" in prompt
    assert "- Logged in user ID: u7\n- REGION: EU" in prompt


def test_the_fleet_prompt_lists_tools_as_functions() -> None:
    prompt = build_fleet_system_prompt(TOOLS, today=TODAY)
    section = prompt.split("## Available Tools\n")[1].split("\n\n## ")[0]
    assert [tool["function"]["name"] for tool in json.loads(section)] == ["find", "read"]
    assert "The tools are: find, read." in prompt


@pytest.mark.parametrize("variables", [None, {}, {"CURRENT_DATE": "2020-01-01"}])
def test_the_fleet_prompt_has_no_context_without_variables_and_never_their_date(variables: dict[str, Any] | None) -> None:
    prompt = build_fleet_system_prompt(TOOLS, today=TODAY, env_variables=variables)
    assert "Environment Context" not in prompt
    assert "Browser" not in prompt
    assert "2020" not in prompt


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ('{"id": 47}', 'Tool result:\n{"id": 47}'),
        ({"id": 47}, 'Tool result:\n{\n  "id": 47\n}'),
        ([1], "Tool result:\n[\n  1\n]"),
        (0, "Tool result:\n0"),
        (False, "Tool result:\nfalse"),
        ({"x": float("nan")}, 'Tool result:\n{\n  "x": NaN\n}'),
        ("", "Action executed."),
        (None, "Action executed."),
        ({}, "Action executed."),
        (" Error: no such item", "Error: no such item"),
        ("error: no such item", "error: no such item"),
        ({"error": "no such item"}, "Error: no such item"),
        ({"error": "", "id": 1}, 'Tool result:\n{\n  "error": "",\n  "id": 1\n}'),
    ],
)
def test_results_are_shown_as_in_the_reference(result: Any, text: str) -> None:
    assert format_tool_result(result) == text


def test_errors_carry_their_prefix_once() -> None:
    assert format_error("no") == format_error("Error: no") == "Error: no"
    assert format_error("").startswith("Error: ")


def test_an_unknown_tool_is_answered_with_the_known_ones() -> None:
    assert format_unknown_tool("fnd", TOOLS) == 'Error: unknown tool "fnd". Available tools: find, read'


def test_the_answer_to_a_missing_call_shows_the_format() -> None:
    assert NO_CALL == 'No tool call found. Use <tool_call>{"name": "...", "arguments": {...}}</tool_call> format.'
    assert format_further_calls(2) == "\n(2 further tool calls not executed: one per message.)"


@given(text=st.text(alphabet=st.characters(exclude_categories=()), max_size=300), limit=st.integers(60, 200))
def test_a_cut_text_is_within_its_limit_and_says_that_it_was_cut(text: str, limit: int) -> None:
    cut = truncate_text(text, limit)
    assert len(cut.encode()) <= limit
    portable = text.encode("utf-8", "replace")
    if len(portable) > limit:
        assert cut.endswith(f"[TRUNCATED - {len(text)} chars total]")
    else:
        assert cut == portable.decode()


def test_a_lone_surrogate_becomes_a_character_that_can_be_sent() -> None:
    assert truncate_text("a\ud800b", 100) == "a?b"
