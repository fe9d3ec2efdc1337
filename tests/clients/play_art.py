"""ART's own gathering of trajectory groups on environments under faults, for a Python with it and fleetbus: ``play_art.py
FACTS``; see `test_trainers.py`. What stands in is the model's endpoint.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import art
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from fleetbus_workers.trainers.art import play_group
from fleetbus_workers.trainers.sampled_episode import EpisodeSource


class Model:
    """What is used of ``art.TrainableModel``."""

    def get_inference_name(self) -> str:
        return "scripted"

    def openai_client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=self))

    async def create(self, *, model: str, messages: list[dict[str, Any]], **_: Any) -> ChatCompletion:
        said = sum(message["role"] == "assistant" for message in messages)
        message = ChatCompletionMessage(role="assistant", content=f"step {said + 1}")
        choice = Choice(index=0, finish_reason="stop", message=message)
        return ChatCompletion(id="c", choices=[choice], created=0, model=model, object="chat.completion")


async def play(facts: dict[str, Any]) -> None:
    source = EpisodeSource.open(None, url=facts["url"], run=facts["run"], tasks=facts["tasks"])
    enough, played = Path(facts["enough"]), 0
    while played < facts["episodes"] or not enough.exists():  # noqa: ASYNC240
        groups = [play_group(source, key, Model(), group_size=facts["parallel"]) for key in source.tasks]
        (group,) = await art.gather_trajectory_groups(groups)
        assert not group.exceptions
        for trajectory in group:
            sampled = [each.message.content for each in trajectory.messages_and_choices if isinstance(each, Choice)]
            observed = [each["content"] for each in trajectory.messages_and_choices if not isinstance(each, Choice)][1:]
            print(json.dumps({"sampled": sampled, "observed": observed, "reward": trajectory.reward}), flush=True)
            played += 1


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
