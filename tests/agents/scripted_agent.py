"""An agent without any package: asks as often as its task says, writes what it was answered into ``answers.json``."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path


def ask(messages: list[dict[str, object]], **more: object) -> dict[str, object]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "policy"} | more | {"messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]  # type: ignore[no-any-return]


def play(task: dict[str, object]) -> None:
    config = task.get("config") or {}
    assert isinstance(config, dict)
    if "exit" in config:
        print("no such luck")
        sys.exit(config["exit"])
    told_by_model: dict[str, list[dict[str, object]]] = {}
    answers = []
    for number in range(config.get("calls", 2)):
        limits = config.get("limits") or [{}] * 99
        model = str(limits[number].get("model"))
        messages = told_by_model.setdefault(model, [{"role": "system", "content": "Be brief."}])
        messages.append({"role": "user", "content": f"{task['prompt']} {number}"})
        answer = ask(messages, **limits[number])
        answers.append(answer["content"])
        messages.append({"role": "assistant", "content": answer["content"]})
    if config.get("repair"):
        told = messages[:2]
        if config["repair"] == "with the answer":
            told = [*messages, {"role": "user", "content": "As JSON."}]
        ask(told, response_format={"type": "json_object"})
    Path("answers.json").write_text(json.dumps(answers))
    if "reward" in config:
        body = json.dumps({"reward": config["reward"], "seats": config.get("seats", {})}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(os.environ["FLEETBUS_REWARD_URL"], data=body, headers=headers))
    time.sleep(config.get("linger", 0))
    if config.get("fail_at_end"):
        sys.exit("it broke")


if __name__ == "__main__":
    play(json.loads(Path(os.environ["FLEETBUS_TASK_FILE"]).read_text()))
