"""Episodes of one task with the same actions: what an environment did in one of them, it did in all, or a replay shows nothing.

A replay takes environments to repeat themselves: the same task and actions, the same observations and verdict. So of recorded
episodes that are alike in both, and in what came of them, one need be played. What is lost is a look at environments in which
one episode disturbs another. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from fleetbus_schemas import EpisodeFinished
from fleetbus_workers.replay.report import Report
from fleetbus_workers.replay.story import Asked, Story

OBSERVED = ("turn", "messages", "tools", "tokens_left")
CONCLUDED = (
    *("outcome", "error_class", "error", "reward", "turn_rewards", "turns", "tokens", "loss_mask"),
    *("tool_calls", "tool_errors", "task_key", "dataset_version", "env", "success", "info", "last_observation"),
)
"""What environment and verifier decide of an Observation and of a result. The rest names episode, request, policy."""

_encode = msgspec.msgpack.Encoder().encode


def distinct_stories(stories: Iterable[Story], report: Report) -> Iterator[Story]:
    """The stories of which none before is a twin; ``report`` counts the others. What was not recorded to its end has none."""
    outcomes: dict[bytes, bytes] = {}
    for story in stories:
        given, made = inputs_of(story), outputs_of(story)
        if made is None or outcomes.setdefault(given, made) is made:
            yield story
        elif outcomes[given] == made:
            report.notes["episodes like another that was played, in task, actions and all that came of them"] += 1
        else:
            yield story  # alike, and yet something else came of it: let the worker say what is right


def inputs_of(story: Story) -> bytes:
    """All that an environment is given in an episode."""
    request = story.request
    assert request is not None
    limits = (request.max_turns, request.max_tokens)
    return _encode((request.task, limits, [_action(asked) for asked in story.turns]))


def _action(asked: Asked) -> tuple[object, ...]:
    """What a session and its environment see of an Action: what was said, and how many tokens it took."""
    action = asked.action
    if action is None:
        return ()
    sizes = (len(action.prompt_delta), len(action.sampled))
    return (action.text, action.tool_calls, action.finish_reason, action.error_class, action.error, sizes)


def outputs_of(story: Story) -> bytes | None:
    """All that it made of them; None if the recording ends before the episode."""
    result: EpisodeFinished | None = story.result
    if result is None or any(asked.action is None for asked in story.turns):
        return None
    observed = [[getattr(asked.observation, name) for name in OBSERVED] for asked in story.turns]
    return _encode((observed, [getattr(result, name) for name in CONCLUDED]))
