"""Episodes of one task with the same actions and outcome, of which one need be played. Pure.

A replay assumes that environments are deterministic: the same task and actions, the same observations and verdict. What is lost
is a check of environments in which one episode disturbs another.
"""

from collections.abc import Iterable, Iterator

import msgspec

from fleetbus_workers.replay.recorded_episode import RecordedEpisode, RecordedTurn
from fleetbus_workers.replay.report import Report

OBSERVED = ("turn", "messages", "tools", "tokens_left", "seat")
CONCLUDED = (
    *("outcome", "error_class", "error", "reward", "turn_rewards", "turns", "tokens", "loss_mask"),
    *("tool_calls", "tool_errors", "task_key", "dataset_version", "env", "success", "info", "last_observation", "seats"),
)
"""What environment and verifier decide of an Observation and of a result. The rest names episode, request, policy."""

_encode = msgspec.msgpack.Encoder().encode


def remove_duplicates(episodes: Iterable[RecordedEpisode], report: Report) -> Iterator[RecordedEpisode]:
    """The episodes that repeat none before them; ``report`` counts the others. An episode without a recorded end, and one
    with the inputs of an earlier one but other outputs, is kept."""
    outputs: dict[bytes, bytes] = {}
    for episode in episodes:
        given, made = encode_inputs(episode), encode_outputs(episode)
        if made is not None and outputs.setdefault(given, made) is not made and outputs[given] == made:
            report.notes["episodes like another that was played, in task, actions and all that came of them"] += 1
        else:
            yield episode


def encode_inputs(episode: RecordedEpisode) -> bytes:
    """All that an environment is given in an episode."""
    request = episode.request
    assert request is not None
    turns = [_action_fields(turn) for turn in episode.turns]
    return _encode((request.task, request.max_turns, request.max_tokens, request.seat_limits, turns))


def _action_fields(turn: RecordedTurn) -> tuple[object, ...]:
    """The fields of an Action that a session and its environment read: what was said, and its number of tokens."""
    action = turn.action
    if action is None:
        return ()
    sizes = (len(action.prompt_delta), len(action.sampled))
    return (action.text, action.tool_calls, action.finish_reason, action.error_class, action.error, sizes)


def encode_outputs(episode: RecordedEpisode) -> bytes | None:
    """All that environment and verifier made of the inputs; None if the recording ends before the episode."""
    result = episode.result
    if result is None or any(turn.action is None for turn in episode.turns):
        return None
    observed = [[getattr(turn.observation, name) for name in OBSERVED] for turn in episode.turns]
    return _encode((observed, [getattr(result, name) for name in CONCLUDED]))
