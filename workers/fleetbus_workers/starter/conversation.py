"""Conversations of the default task, played by an expert that errs on purpose: the data of the warm start. Pure.

The expert errs with probability `ERROR_RATE` in every turn and so reaches the right answer in about 35 % of the episodes: a
policy that imitates it well has something left to learn. A look-up of an item that the warehouse lacks is answered by an
error and tried again; every other mistake ends in a wrong answer.
"""

import json
import random

import msgspec

from fleetbus.core.text.prompts import build_compact_system_prompt, format_error, format_tool_result
from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.warehouse.items import FIELDS, NAMES, TOOLS, Warehouse, draw_warehouse, question

ERROR_RATE = 0.35

TURN_LIMIT = 5
"""Turns of an episode of the default task, the answer included."""

DONE = "<done>"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode as messages, and whether its last answer was the right one."""

    messages: tuple[ChatMessage, ...]
    success: bool


def build_opening(warehouse: Warehouse) -> tuple[ChatMessage, ...]:
    """The messages before the policy's first turn: the system prompt and the question."""
    return (
        ChatMessage(role="system", content=build_compact_system_prompt(TOOLS)),
        ChatMessage(role="user", content=question(warehouse)),
    )


def format_tool_call(tool: str, /, **arguments: object) -> str:
    """A call as the policy writes it."""
    return "<tool_call>" + json.dumps({"name": tool, "arguments": arguments}) + "</tool_call>"


def format_json_result(result: dict[str, object]) -> str:
    """A result as the environment shows it."""
    return format_tool_result(json.dumps(result))


def format_missing_item(name: str) -> str:
    """The text that the environment shows when there is no such item."""
    return format_error(f'no item "{name}"')


def play(warehouse: Warehouse, draw: random.Random, *, error_rate: float = ERROR_RATE) -> Conversation:
    """One episode of the erring expert; at most `TURN_LIMIT` turns."""
    messages = list(build_opening(warehouse))
    rows = {item.name: item for item in warehouse.items}
    row = None
    while row is None and len(messages) < 2 * (TURN_LIMIT - 1):
        name = draw.choice(NAMES) if draw.random() < error_rate else warehouse.name
        row = rows.get(name)
        seen = format_missing_item(name) if row is None else format_json_result({"id": row.id})
        messages += _build_turn(format_tool_call("find_item", name=name), seen)
    if row is None:
        return _finish_conversation(messages, warehouse, 0)
    if draw.random() < error_rate:
        if draw.random() < 0.5:
            return _finish_conversation(messages, warehouse, row.id)
        field = draw.choice([field for field in FIELDS if field != warehouse.field])
    else:
        field = warehouse.field
    messages += _build_turn(
        format_tool_call("get_field", id=row.id, field=field), format_json_result({field: row.field(field)})
    )
    return _finish_conversation(messages, warehouse, row.id if draw.random() < error_rate else row.field(field))


def play_many(count: int, *, seed: int) -> list[Conversation]:
    """``count`` episodes in warehouses drawn from ``seed``; never the held-out ones, whose seeds are higher."""
    draw = random.Random(seed)
    return [play(draw_warehouse(draw.randrange(1 << 29)), draw) for _ in range(count)]


def _build_turn(said: str, seen: str) -> tuple[ChatMessage, ChatMessage]:
    return ChatMessage(role="assistant", content=said), ChatMessage(role="user", content=seen)


def _finish_conversation(messages: list[ChatMessage], warehouse: Warehouse, answer: int) -> Conversation:
    messages.append(ChatMessage(role="assistant", content=f"{answer} {DONE}"))
    return Conversation(messages=tuple(messages), success=answer == warehouse.answer)
