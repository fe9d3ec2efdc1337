"""Gemini's clients send every call of a conversation again with each turn: its results are found without searching them all."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus_schemas import ToolCall
from fleetbus_workers.environment.adapters.agent.dialects import gemini

TURNS = 1000


def build_body(turns: list[tuple[dict[str, str], dict[str, str]]]) -> dict[str, object]:
    contents: list[dict[str, Any]] = []
    for called, answered in turns:
        contents.append({"role": "model", "parts": [{"functionCall": {**called, "args": {}}}]})
        contents.append({"role": "user", "parts": [{"functionResponse": {**answered, "response": {"output": "ok"}}}]})
    return {"contents": contents, "method": "generateContent"}


@pytest.mark.parametrize("ids", [True, False])
def test_results_of_other_calls_do_not_cost_a_look_at_every_call(monkeypatch: pytest.MonkeyPatch, ids: bool) -> None:
    reads: list[str] = []

    class Watched(ToolCall, frozen=True, kw_only=True):
        def __getattribute__(self, name: str) -> Any:
            reads.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(gemini, "ToolCall", Watched)
    turns = [
        ({"name": "think"} | ({"id": f"c{turn}"} if ids else {}), {"name": "other"} | ({"id": f"x{turn}"} if ids else {}))
        for turn in range(TURNS)
    ]
    call = gemini.parse(build_body(turns))
    assert len(call.messages) == 2 * TURNS
    assert len([name for name in reads if name in ("id", "name")]) <= 4 * TURNS


def test_a_result_is_of_the_first_call_that_it_can_be_of() -> None:
    turns = [
        ({"name": "read", "id": "a"}, {"name": "other"}),
        ({"name": "read", "id": "b"}, {"name": "read"}),
        ({"name": "read", "id": "c"}, {"name": "read", "id": "c"}),
        ({"name": "list"}, {"name": "read"}),
        ({"name": "read", "id": "d"}, {"name": "read", "id": "a"}),
        ({"name": "read", "id": "d"}, {"name": "read", "id": "d"}),
    ]
    results = [message.tool_call_id for message in gemini.parse(build_body(turns)).messages if message.role == "tool"]
    assert results == ["", "a", "c", "b", "a", "d"]
