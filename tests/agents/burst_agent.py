"""An agent that asks several sub-agents at once, in rounds, and rewards itself if no two answers are the same."""

from __future__ import annotations

import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=80) as answer:
        return {"role": "assistant", "content": json.load(answer)["choices"][0]["message"]["content"]}


def converse(conversation: list[dict[str, Any]]) -> None:
    conversation.append({"role": "user", "content": f"part {conversation[0]['content']}, {len(conversation)}"})
    conversation.append(ask(conversation))


if __name__ == "__main__":
    config = json.loads(Path(os.environ["FLEETBUS_TASK_FILE"]).read_text())["config"]
    conversations = [[{"role": "system", "content": f"helper {number}"}] for number in range(config["calls"])]
    with ThreadPoolExecutor(len(conversations)) as pool:
        for _ in range(config["rounds"]):
            list(pool.map(converse, conversations))
    answers = [each["content"] for conversation in conversations for each in conversation if each["role"] == "assistant"]
    body = json.dumps({"reward": float(len(set(answers)) == len(answers))}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["FLEETBUS_REWARD_URL"], body, headers)).close()
