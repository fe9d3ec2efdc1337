"""An agent of the warehouse that owns its loop: prompt, parsing and tools are its own; the model is whatever it is pointed to.

The variable AGENT_CLIENT says what it asks with: ``urllib``, or the package ``openai``, ``anthropic`` or ``litellm``.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from typing import Any

from fleetbus.core.text.prompts import build_compact_system_prompt
from fleetbus_workers.environment.adapters.warehouse.items import FIELDS, TOOLS, draw_warehouse

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MAX_TURNS = 5
CLIENT = os.environ.get("AGENT_CLIENT", "urllib")


def play(task: dict[str, Any]) -> float:
    """Call tools until the answer; returns what that is worth."""
    warehouse = draw_warehouse(task["seed"])
    system, messages = build_compact_system_prompt(TOOLS), [{"role": "user", "content": task["prompt"]}]
    answer = ""
    for _ in range(MAX_TURNS):
        text = ask(system, messages)
        messages.append({"role": "assistant", "content": text})
        if "<done>" in text:
            answer = text.partition("<done>")[0].strip()
            break
        found = CALL.search(text)
        messages.append({"role": "user", "content": run_tool(warehouse, found[1]) if found else "Error: no call"})
    wanted = next(item for item in warehouse.items if item.name == warehouse.name).field(warehouse.field)
    return float(answer == str(wanted))


def run_tool(warehouse: Any, text: str) -> str:
    try:
        call = json.loads(text)
        name, given = call["name"], call["arguments"]
        if name == "find_item":
            item = next(item for item in warehouse.items if item.name == given["name"])
            return "Tool result:\n" + json.dumps({"id": item.id})
        item = next(item for item in warehouse.items if item.id == given["id"])
        assert name == "get_field" and given["field"] in FIELDS
        return "Tool result:\n" + json.dumps({given["field"]: item.field(given["field"])})
    except (ValueError, LookupError, TypeError, StopIteration, AssertionError):
        return "Error: wrong call"


def ask(system: str, messages: list[dict[str, Any]]) -> str:
    whole = [{"role": "system", "content": system}, *messages]
    if CLIENT == "openai":
        from openai import OpenAI

        return OpenAI().chat.completions.create(model="policy", messages=whole).choices[0].message.content or ""  # type: ignore[arg-type]
    if CLIENT == "anthropic":
        from anthropic import Anthropic

        message = Anthropic().messages.create(model="policy", max_tokens=64, system=system, messages=messages)
        return "".join(block.text for block in message.content if block.type == "text")
    if CLIENT == "litellm":
        import litellm

        return litellm.completion("openai/policy", messages=whole).choices[0].message.content or ""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": whole}, headers)
    text: str = answer["choices"][0]["message"]["content"] or ""
    return text


def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers | {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


if __name__ == "__main__":
    with open(os.environ["FLEETBUS_TASK_FILE"], "rb") as file:
        reward = play(json.load(file))
    post(os.environ["FLEETBUS_REWARD_URL"], {"reward": reward}, {})
