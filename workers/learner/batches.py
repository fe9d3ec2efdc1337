"""From finished groups to what the trainer takes: Actions read from the log by position, advantages by group.

Token ids and log-probabilities are used as they stand in the Actions; nothing is tokenised here.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import numpy as np
from numpy.typing import NDArray

from fleetbus.bus.base import Bus
from fleetbus.core.advantages import ADVANTAGES
from fleetbus.core.groups import Group
from fleetbus.episodes import decoded
from schemas import Action, EpisodeFinished, Subjects
from workers.learner.base import TrainingSequence

READS_AT_A_TIME = 32


class MissingActions(Exception):
    """The log does not hold the Actions that a result names."""


async def read_sequences(
    bus: Bus, subjects: Subjects, groups: Sequence[Group], *, advantage: str, minimum: int, temperature: float
) -> list[TrainingSequence]:
    """The graded episodes of ``groups`` as training sequences, in a fixed order; raises `MissingActions`."""
    results = [result for group in groups for result in group.graded]
    numbers = np.array([number for number, group in enumerate(groups) for _ in group.graded])
    rewards = np.array([result.reward for result in results], dtype=np.float64)
    advantages = ADVANTAGES[advantage](rewards, numbers, minimum=minimum)
    actions = await _read_actions(bus, subjects, results)
    return [
        _sequence(result, actions[result.episode_id], float(value), temperature)
        for result, value in zip(results, advantages, strict=True)
    ]


async def _read_actions(bus: Bus, subjects: Subjects, results: Sequence[EpisodeFinished]) -> dict[str, list[Action]]:
    found: dict[str, list[Action]] = {}
    limiter = anyio.CapacityLimiter(READS_AT_A_TIME)

    async def read(result: EpisodeFinished) -> None:
        async with limiter:
            found[result.episode_id] = await _actions_of(bus, subjects, result)

    async with anyio.create_task_group() as group:
        for result in results:
            group.start_soon(read, result)
    return found


async def _actions_of(bus: Bus, subjects: Subjects, result: EpisodeFinished) -> list[Action]:
    """The Actions that the result refers to, in turn order; an episode may hold others, of attempts that were cut."""
    lanes = sorted({reference.lane for reference in result.actions})
    entries = await bus.history([subjects.action(lane, result.episode_id) for lane in lanes])
    by_sequence = {entry.sequence: action for entry, action in decoded(Action, entries)}
    try:
        return [by_sequence[reference.sequence] for reference in result.actions]
    except KeyError as missing:
        raise MissingActions(f"episode {result.episode_id}: no Action at position {missing}") from missing


def _sequence(result: EpisodeFinished, actions: Sequence[Action], advantage: float, temperature: float) -> TrainingSequence:
    ids = np.frombuffer(b"".join(action.prompt_delta + action.sampled for action in actions), "<u4").astype(np.int32)
    mask = np.unpackbits(np.frombuffer(result.loss_mask, np.uint8), count=result.tokens, bitorder="little").astype(bool)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = np.frombuffer(b"".join(action.logprobs for action in actions), "<f4")
    versions = np.full(len(ids), -1, np.int32)
    versions[mask] = np.concatenate([_versions(action) for action in actions])
    return TrainingSequence(
        episode_id=result.episode_id,
        group_id=result.group_id,
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        versions=versions,
        temperature=temperature or 1.0,
    )


def _versions(action: Action) -> NDArray[np.int32]:
    """The version that sampled each token of one Action; -1 if weights were swapped within it, for then its later tokens
    were sampled upon keys and values of the version before, and no single version made them."""
    version = action.versions[0].version if len(action.versions) == 1 else -1
    return np.full(len(action.sampled) // 4, version, np.int32)
