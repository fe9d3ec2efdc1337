"""An agent that asks a sub-agent, goes on, asks the same question again, cuts its history and asks two sub-agents at once."""

from __future__ import annotations

import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAIN, HELPER = {"role": "system", "content": "Plan."}, {"role": "system", "content": "Look."}


def ask(*messages: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return {"role": "assistant", "content": json.load(answer)["choices"][0]["message"]["content"]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask_side_by_side(*names: str) -> None:
    """Sub-agents whose conversations of two turns grow at the same time."""

    def converse(name: str) -> None:
        opening = user(f"sub-task {name}")
        answer = ask(HELPER, opening)
        ask(HELPER, opening, answer, user(f"more {name}"))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(converse, names))


if __name__ == "__main__":
    first = ask(MAIN, user("task"))
    ask(HELPER, user("sub-task"))
    second = ask(MAIN, user("task"), first, user("go on"))
    ask(HELPER, user("sub-task"))
    ask(MAIN, user("task"), user("summary"))
    ask_side_by_side("a", "b")
    ask(MAIN, user("task"), first, user("go on"), second, user("the end"))
    body = json.dumps({"reward": 1.0}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["FLEETBUS_REWARD_URL"], body, headers)).close()
