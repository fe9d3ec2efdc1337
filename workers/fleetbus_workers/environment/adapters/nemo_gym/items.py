"""Rows of NeMo Gym's datasets and the items of its responses: what a policy is told, and what its server is told of it.

Gym speaks in items of OpenAI's responses: messages, calls of functions and their outputs. Above it is `environment`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict
from fleetbus_workers.environment.failure_location import clean_error

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
RESERVED = frozenset({"verify", "seed_session", "close_session", "aggregate_metrics", "reverify_mode", "mcp"})
"""Addresses of a server that are no tools."""


def read_prompt(row: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """The messages of a row. Raises `EnvironmentFailed` for what is no text: images, files, earlier calls."""
    asked = _read_params(row).get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(items, list) or not items:
        raise EnvironmentFailed("config.row: responses_create_params.input is neither a text nor a list of messages")
    return tuple(_read_message(item) for item in items)


def read_tools(row: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """The functions that a row offers. Raises `EnvironmentFailed` for other tools, and for names that are none."""
    tools = []
    for tool in _read_params(row).get("tools") or ():
        name = tool.get("name") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(name, str) or not name or name in RESERVED:
            raise EnvironmentFailed(f"config.row: a tool is no function that the server could have: {str(tool)[:200]}")
        tools.append(ToolSpec(name, tool.get("description") or "", tool.get("parameters") or {}))
    return tuple(tools)


def build_message(number: int, text: str) -> dict[str, Any]:
    """A text of the policy's, as an item."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}


def build_call(number: int, call: ToolCall, output: str) -> list[dict[str, Any]]:
    """A call and its output, as items."""
    call_id = f"call_{number}"
    arguments = json.dumps(call.arguments)
    return [
        {"id": f"fc_{number}", "type": "function_call", "call_id": call_id, "name": call.name, "arguments": arguments}
        | {"status": "completed"},
        {"type": "function_call_output", "call_id": call_id, "output": output},
    ]


def build_response(row: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The response that ``/verify`` grades: all that the policy said and got, as if it had been one answer."""
    params = _read_params(row)
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0.0,
        "model": str(params.get("model") or "policy"),
        "output": list(items),
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
    }


def read_verdict(answer: object) -> Verdict:
    """The grade of a sample; none where the server masks it, or gives no number: then the reason says its kind of failure. A
    kind of failure alone masks nothing: such a reward is a measurement, by Gym's own words."""
    if not isinstance(answer, dict):
        return Verdict(reward=None, reason="/verify answered with no object")
    kind, told = answer.get("failure_kind"), answer.get("failure_reason")
    reason = clean_error(": ".join(str(part) for part in (kind, told) if part))
    reward = answer.get("reward")
    if answer.get("mask_sample"):
        return Verdict(reward=None, reason=reason or "the server masks this sample, and does not say why")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        return Verdict(reward=None, reason=reason or f"the server's reward is no number: {str(reward)[:100]}")
    parts = answer.get("reward_components")
    numbers = parts.items() if isinstance(parts, dict) else ()
    components = {str(name): float(part) for name, part in numbers if isinstance(part, int | float) and math.isfinite(part)}
    return Verdict(reward=float(reward), reason=reason, components=components)


def _read_params(row: Mapping[str, Any]) -> Mapping[str, Any]:
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        raise EnvironmentFailed("config.row has no responses_create_params: it is a row of the server's dataset, as it stands")
    return params


def _read_message(item: object) -> ChatMessage:
    if isinstance(item, dict) and item.get("type", "message") == "message" and item.get("role") in ROLES:
        content = item.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        if isinstance(content, str):
            return ChatMessage(role=ROLES[item["role"]], content=content)  # type: ignore[arg-type]
    raise EnvironmentFailed(f"config.row: an item of the input is no message of text: {str(item)[:200]}")
