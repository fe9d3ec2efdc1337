"""What the log has of one session, as JSON: its turns with token ids, and how it ended."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbus.bus.base import Bus
from fleetbus.episodes import read_answered_observations, read_episode_state, read_turns
from fleetbus_schemas import EpisodeRequested, Subjects, decode
from fleetbus_schemas.tokens import unpack_ids, unpack_logprobs
from fleetbus_workers.environment.episode.segments import Placement


async def read_trajectory(bus: Bus, subjects: Subjects, pool: str, episode: str) -> dict[str, Any] | None:
    """None for an episode that nobody asked for, or that has left the log. ``prompt_ids`` are what a turn's messages became,
    ``sampled_ids`` and ``logprobs`` what the policy said; a turn continues the ids of its ``segment``."""
    stored = await bus.last(subjects.task(pool, episode))
    if stored is None:
        return None
    request = decode(EpisodeRequested, stored.payload, subject=stored.subject)
    state = await read_episode_state(bus, subjects, episode)
    turns = await read_turns(bus, subjects, episode, state)
    observed = await read_answered_observations(bus, subjects, request.policy, episode, turns)
    shown = []
    for turn in turns:
        action, asked = turn.action, observed.get(turn.action.turn)
        shown.append(
            {
                "turn": action.turn,
                "segment": action.segment,
                "origin": None if asked is None else msgspec.to_builtins(Placement.of(asked).origin),
                "messages": [] if asked is None else msgspec.to_builtins(asked.messages),
                "tools": [] if asked is None else msgspec.to_builtins(asked.tools),
                "text": action.text,
                "tool_calls": msgspec.to_builtins(action.tool_calls),
                "prompt_ids": unpack_ids(action.prompt_delta),
                "sampled_ids": unpack_ids(action.sampled),
                "logprobs": unpack_logprobs(action.logprobs),
                "versions": [span.version for span in action.versions],
            }
        )
    result = state.result
    return {
        "id": episode,
        "task_key": request.task.key,
        "split": request.split,
        "attempts": state.attempts,
        "turns": shown,
        "outcome": None if result is None else result.outcome,
        "reward": None if result is None else result.reward,
    }
