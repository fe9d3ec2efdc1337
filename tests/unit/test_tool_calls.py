"""The reference table of Fleet's SkyRL parser, row by row, in both readings; and that no input whatever raises."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleetbus.core.text.tool_calls import final_answer, is_done, parse_tool_calls
from fleetbus_schemas import Action, ToolCall, encode

CALL = '{"name": "f", "arguments": {"x": 1}}'
F1: tuple[str, Any] = ("f", {"x": 1})
HUGE = "9" * 5000

ROWS: list[tuple[str, str, tuple[Any, Any] | None, tuple[str, Any] | None]] = [
    # what it is, the text, the strict reading, the default reading
    ("closed", f"<tool_call>{CALL}</tool_call>", F1, F1),
    ("unclosed", f"<tool_call>{CALL}", F1, F1),
    ("unclosed, then a special token", f"<tool_call>{CALL}<|im_end|>", F1, F1),
    ("one closer missing", f"<tool_call>{CALL[:-1]}</tool_call>", F1, F1),
    ("two closers missing", f"<tool_call>{CALL[:-2]}</tool_call>", F1, F1),
    (
        "three closers missing",
        '<tool_call>{"name": "f", "arguments": {"x": {"y": 1',
        ("f", {"x": {"y": 1}}),
        ("f", {"x": {"y": 1}}),
    ),
    ("four closers missing", '<tool_call>{"name":"f","arguments":{"x":{"y":{"z":1', None, ("f", {"x": {"y": {"z": 1}}})),
    ("missing ]", '<tool_call>{"name": "f", "arguments": {"x": [1, 2}}</tool_call>', None, ("f", {"x": [1, 2]})),
    ("truncated string", '<tool_call>{"name": "f", "arguments": {"x": "ab</tool_call>', None, None),
    ("trailing garbage", f"<tool_call>{CALL} and so on</tool_call>", None, F1),
    ("extra }", f"<tool_call>{CALL}}}</tool_call>", None, F1),
    ("single quotes", "<tool_call>{'name': 'f'}</tool_call>", None, None),
    ("fenced", f"<tool_call>```json\n{CALL}\n```</tool_call>", None, F1),
    ("a list", f"<tool_call>[{CALL}]</tool_call>", None, None),
    ("upper-case tag", f"<TOOL_CALL>{CALL}</TOOL_CALL>", None, F1),
    ("no tag", CALL, None, None),
    ("Qwen's XML", "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>", None, None),
    ("prose after an unclosed call", f"<tool_call>{CALL}\nNow I wait.", None, F1),
    (
        "closing tag inside a string",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
        None,
        ("f", {"x": "</tool_call>"}),
    ),
    ("integer of 5000 digits", f'<tool_call>{{"name": "f", "arguments": {{"x": {HUGE}}}}}</tool_call>', None, None),
    ("alias input", '<tool_call>{"name": "f", "input": {"x": 1}}</tool_call>', ("f", {}), F1),
    ("alias tool", '<tool_call>{"tool": "f", "params": {"x": 1}}</tool_call>', F1, F1),
    ("empty arguments and params", '<tool_call>{"name": "f", "arguments": {}, "params": {"x": 1}}</tool_call>', F1, F1),
    ("null arguments", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("f", {}), ("f", {})),
    (
        "null arguments and params",
        '<tool_call>{"name": "f", "arguments": null, "params": null}</tool_call>',
        ("f", None),
        ("f", {}),
    ),
    ("arguments as JSON text", '<tool_call>{"name":"f","arguments":"{\\"x\\": 1}"}</tool_call>', ("f", '{"x": 1}'), F1),
    ("arguments as other text", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', ("f", "x"), None),
    ("arguments as a list", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ("f", [1]), None),
    ("name that is a number", '<tool_call>{"name": 5}</tool_call>', (5, {}), None),
    ("no name", '<tool_call>{"arguments": {"x": 1}}</tool_call>', None, None),
    ("two calls", f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "g"}}</tool_call>', F1, F1),
    ("first invalid, second valid", f"<tool_call>no</tool_call><tool_call>{CALL}</tool_call>", None, F1),
    ("invalid, then function_call", f"<tool_call>no</tool_call><function_call>{CALL}</function_call>", F1, F1),
    ("function_call", f"<function_call>{CALL}</function_call>", F1, F1),
]


def as_pair(call: ToolCall | None) -> tuple[Any, Any] | None:
    return None if call is None else (call.name, call.arguments)


@pytest.mark.parametrize(("text", "expected"), [pytest.param(row[1], row[2], id=row[0]) for row in ROWS])
def test_the_strict_reading_equals_the_reference(text: str, expected: tuple[Any, Any] | None) -> None:
    assert as_pair(parse_tool_calls(text, strict=True).call) == expected


@pytest.mark.parametrize(("text", "expected"), [pytest.param(row[1], row[3], id=row[0]) for row in ROWS])
def test_the_default_reading_takes_what_can_be_taken(text: str, expected: tuple[str, Any] | None) -> None:
    parsed = parse_tool_calls(text)
    assert as_pair(parsed.call) == expected
    assert parsed.call or parsed.errors or "<" not in text, "a block without a call must say what is wrong with it"


@pytest.mark.parametrize("strict", [True, False])
def test_nan_is_read_as_nan(strict: bool) -> None:
    call = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', strict=strict).call
    assert call is not None
    assert math.isnan(call.arguments["x"])


def test_every_call_is_listed_in_order() -> None:
    text = f'<tool_call>{CALL}</tool_call> then <function_call>{{"name": "g"}}</function_call> <tool_call>x</tool_call>'
    parsed = parse_tool_calls(text)
    assert [call.name for call in parsed.calls] == ["f", "g"]
    assert len(parsed.errors) == 1


def test_numbers_beyond_64_bits_become_floats_that_a_message_can_carry() -> None:
    call = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"x": 100000000000000000000}}</tool_call>').call
    assert call is not None
    assert call.arguments == {"x": 1e20}


@pytest.mark.parametrize(
    ("text", "done"),
    [("82 <done>", True), ("[DONE]", True), ("<Done>", True), ("done", False), ("<done", False), ("", False)],
)
def test_the_end_mark_is_found_in_any_case(text: str, done: bool) -> None:
    assert is_done(text) is done


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("82 <done>", "82"),
        ("  It is 82. [DONE]\n", "It is 82."),
        (f"So: <tool_call>{CALL}</tool_call> 82 <done>", "So:  82"),
        ("<tool_call>broken</tool_call>82<done>", "82"),
        ("<done>", ""),
    ],
)
def test_the_final_answer_has_neither_calls_nor_mark(text: str, answer: str) -> None:
    assert final_answer(text) == answer


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function_call>",
    "<done>",
    "<|",
    '{"name":',
    '"f"',
    '"arguments":',
    "{",
    "}",
    "[",
    "]",
]
PIECES += ['"', "\\", "\\ud800", ",", ":", "1", "NaN", "-", "null", "```json", " ", "é", '{"name": "f", "arguments": {"x": 1}}']
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))


@given(text=TEXTS)
@example('<tool_call>{"name": "\\ud800", "arguments": {"\\ud800": "\\ud800"}}</tool_call>')
@example('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>')
@settings(deadline=None, max_examples=300)
def test_any_text_is_read_without_an_exception_and_its_calls_travel(text: str) -> None:
    parsed = parse_tool_calls(text)
    parse_tool_calls(text, strict=True)
    is_done(text)
    final_answer(text)
    assert encode(Action(episode_id="e", attempt=1, turn=0, text="", tool_calls=parsed.calls))


@given(
    name=st.text(min_size=1).filter(lambda name: name.strip() == name),
    arguments=st.dictionaries(st.text(), st.one_of(st.integers(-(1 << 63), 1 << 63), st.text(), st.lists(st.booleans()))),
)
@settings(deadline=None, max_examples=100)
def test_a_well_formed_call_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    text = "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"
    assert as_pair(parse_tool_calls(text).call) == (name, arguments)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>" * 20_000, '<tool_call>{"' * 20_000, "<tool_call>" + "[{" * 100_000, '<tool_call>{"a":' + "[" * 200_000],
    ids=["tags", "strings", "brackets", "depth"],
)
def test_hostile_texts_are_read_in_linear_time(text: str) -> None:
    start = time.process_time()
    parse_tool_calls(text)
    final_answer(text)
    parse_tool_calls(text, strict=True)
    assert time.process_time() - start < 2.0
