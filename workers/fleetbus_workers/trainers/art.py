"""Trajectory groups for ART on a run's environments: ART's model answers, environment workers play.

    source = EpisodeSource.open(None, url="nats://host:4222", run="r1", tasks="tasks.json", max_turns=8)
    groups = await art.gather_trajectory_groups(play_group(source, key, model, group_size=8) for key in source.tasks)
    await model.train(groups)

Needs ART (openpipe-art) 0.5.
"""

from __future__ import annotations

from typing import Any

import art
import openai

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus_schemas import ChatMessage
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded, join_texts


async def play_group(source: EpisodeSource, key: str, model: Any, *, group_size: int, **request: Any) -> art.TrajectoryGroup:
    """``group_size`` episodes of a task; one that failed, or whose model did not answer, is among the group's exceptions, which
    ART leaves out. ``request`` goes into each call of the model's endpoint (``max_tokens``, ``temperature``). Raises
    `UserError` for an unknown key; whatever is raised ends all of the group."""
    source.find_task(key)
    played: list[art.Trajectory | Exception] = []

    async def play() -> None:
        played.append(await _play(source, key, model, request))

    async with open_first_error_task_group() as playing:
        for _ in range(group_size):
            playing.start_soon(play)
    return art.TrajectoryGroup(played)


async def _play(source: EpisodeSource, key: str, model: Any, request: dict[str, Any]) -> art.Trajectory | Exception:
    client, name = model.openai_client(), model.get_inference_name()
    episode = source.speak(key)
    trajectory = art.Trajectory(messages_and_choices=[], metadata={"task_key": key})
    try:
        told = await episode.start()
        while True:
            trajectory.messages_and_choices += [_convert(message) for message in told]
            completion = await client.chat.completions.create(
                model=name, messages=trajectory.messages(), **({"logprobs": True} | request)
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            told = await episode.say(choice.message.content or "")
            if episode.reward is not None:
                trajectory.reward = episode.reward
                trajectory.metrics["turns"] = len(episode.turn_rewards)
                return trajectory.finish()
    except (EpisodeExcluded, openai.OpenAIError) as failure:
        return failure
    finally:
        await episode.close()


def _convert(message: ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": join_texts([message])}
