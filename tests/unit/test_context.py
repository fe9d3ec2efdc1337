"""Outputs that are cut and found again, and budgets in a line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.core.text.context import LINE_CHARACTERS, format_status_line, read_page, search_lines, search_messages
from fleetbus_workers.environment.adapters.mcp.context_tools import NAMES, ContextTools

OUTPUT = "\n".join(f"row {number} of the table" for number in range(1, 1001))


def test_a_budget_is_one_line() -> None:
    line = format_status_line(tokens=12_345, max_tokens=72_000, turn=3, max_turns=50)
    assert line == "[Context: 12,345/72,000 tokens (17%), Turn 3/50]"


def test_a_short_output_stays_as_it_is_and_a_long_one_says_where_the_rest_is() -> None:
    tools = ContextTools(500)
    assert tools.shorten("short") == "short"
    cut = tools.shorten(OUTPUT)
    assert len(cut) <= 500
    assert cut.startswith("row 1 of the table\n")
    assert f"[TRUNCATED - {len(OUTPUT)} chars total. This is output 1: read on with view_tool_output" in cut


def test_every_output_that_was_cut_stays_retrievable_after_later_ones() -> None:
    tools = ContextTools(500)
    tools.shorten(OUTPUT)
    tools.shorten("x" * 5000)
    tools.shorten("short")
    assert "500: row 500 of the table" in str(
        tools.call("search_tool_output", {"pattern": "ROW 500 ", "output": 1}, ()).content
    )
    assert str(tools.call("view_tool_output", {}, ()).content).startswith("[Page 1/1, 13 lines]\n1: xxx")
    assert json.loads(tools.call("check_context", {}, ()).content)["cut_outputs"] == {"1": len(OUTPUT), "2": 5000}


@given(st.text(max_size=3000), st.integers(1, 50))
def test_the_pages_together_are_the_whole_output(text: str, page_size: int) -> None:
    shown: list[str] = []
    page, pages = 1, 1
    while page <= pages:
        head, _, body = read_page(text, page=page, page_size=page_size, limit=1 << 30).partition("\n")
        found = re.match(r"\[Page (\d+)/(\d+), (\d+) lines\]", head)
        assert found is not None
        pages = int(found[2])
        shown += [body] if body else []
        page += 1
    numbered = "\n".join(shown)
    assert len(re.findall(r"(?:^|\n)\d+: ", numbered)) >= len(text.splitlines())
    for line in text.splitlines():
        assert line[:LINE_CHARACTERS] in numbered


def test_a_page_that_is_too_long_is_cut_and_says_so() -> None:
    page = read_page(OUTPUT, page=2, page_size=500, limit=300)
    assert len(page) <= 300
    assert page.endswith("[This page is cut: ask for smaller ones.]")


def test_searches_list_what_they_found_and_how_much_there_is() -> None:
    assert search_lines(OUTPUT, "row 7 of|ROW 8 of") == "Matching lines: 2\n7: row 7 of the table\n8: row 8 of the table"
    assert search_lines(OUTPUT, "row").splitlines()[0] == "Matching lines: 1000, 10 of them shown"
    assert search_lines(OUTPUT, "absent") == "No lines match."
    messages = [("user", "Find the key."), ("assistant", "I look."), ("user", "The KEY is blue.")]
    assert search_messages(messages, "key") == (
        "Matching messages: 2\nmessage 0 (user): Find the key.\nmessage 2 (user): The KEY is blue."
    )


def test_an_expression_that_would_compute_for_ever_is_plain_text() -> None:
    assert search_lines("a" * 5000, "(a+)+$") == "No lines match."


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("view_tool_output", {}, "no output was cut"),
        ("search_history", {}, "pattern must be text"),
        ("search_history", {"pattern": " | "}, "the pattern is empty"),
        ("search_tool_output", {"pattern": "x", "output": 0}, "no output was cut"),
    ],
)
def test_a_mistake_is_told(name: str, arguments: dict[str, object], words: str) -> None:
    result = ContextTools(500).call(name, arguments, ())
    assert result.failed
    assert words in result.content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"page": 99}, "there is no page 99"), ({"page": "1"}, "page must be a whole"), ({"output": 7}, "there is no output 7")],
)
def test_a_page_that_is_not_there_is_told(arguments: dict[str, object], words: str) -> None:
    tools = ContextTools(500)
    tools.shorten(OUTPUT)
    assert words in tools.call("view_tool_output", arguments, ()).content


VALUES = st.none() | st.integers() | st.text()
ARGUMENTS = st.dictionaries(st.sampled_from(["pattern", "page", "output", "page_size"]), VALUES)


@given(st.sampled_from(sorted(NAMES)), ARGUMENTS)
def test_no_arguments_make_it_raise_or_say_too_much(name: str, arguments: dict[str, object]) -> None:
    tools = ContextTools(500)
    tools.shorten(OUTPUT)
    assert len(tools.call(name, arguments, [("user", OUTPUT)]).content) <= 500
