"""From finished groups to what the trainer takes: Actions read from the log by position, advantages by group.

Token ids and log-probabilities are used as they stand in the Actions; nothing is tokenised here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from fleetbus.bus.base import LogBus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import AlgorithmSettings, Configuration, EpisodeSettings, LearnerSettings
from fleetbus.core.algorithms.advantages import ADVANTAGES
from fleetbus.core.algorithms.shaping import TruncationMask, is_masked, overlong_penalty
from fleetbus.core.algorithms.turn_credit import compute_turn_advantages, compute_turn_returns, unpaid_reward
from fleetbus.core.episode.result_checks import find_actions_problem
from fleetbus.core.episode.segments import SegmentError
from fleetbus.core.training.groups import Group
from fleetbus.core.training.own_seats import find_last_finish
from fleetbus.core.training.rewarded_parts import RewardedPart, list_parts
from fleetbus.log.actions import are_lost, find_actions
from fleetbus_schemas import Action, EpisodeFinished, Subjects
from fleetbus_workers.images.reader import ImageReader
from fleetbus_workers.learner.base import Trainer, TrainingSequence
from fleetbus_workers.learner.hooks import load_advantage
from fleetbus_workers.learner.images import exclude_mismatched, read_images
from fleetbus_workers.learner.leaves import Leaf, list_leaves, split_sequence

log = structlog.get_logger()


class CreditPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The way from rewards to advantages. ``advantage`` names a function of the user's that takes the place of the
    estimator. ``overlong_limit`` and ``overlong_buffer`` are tokens of a whole episode."""

    advantage_estimator: str = "grpo"
    advantage: str = ""
    minimum: int = 2
    credit_assignment: Literal["episode", "turn"] = "episode"
    turn_discount: float = 1.0
    truncation_mask: TruncationMask = ""
    overlong_limit: int = 0
    overlong_buffer: int = 0
    overlong_penalty_factor: float = 1.0

    @classmethod
    def from_configuration(cls, configuration: Configuration) -> CreditPlan:
        return cls.from_settings(configuration.algorithm, configuration.learner, configuration.episode)

    @classmethod
    def from_settings(cls, algorithm: AlgorithmSettings, learner: LearnerSettings, episode: EpisodeSettings) -> CreditPlan:
        return cls(
            advantage_estimator=learner.advantage_estimator,
            advantage=algorithm.advantage,
            minimum=learner.min_group_size,
            credit_assignment=algorithm.credit_assignment,
            turn_discount=algorithm.turn_discount,
            truncation_mask=algorithm.truncation_mask,
            overlong_limit=episode.max_episode_tokens,
            overlong_buffer=algorithm.overlong_buffer,
            overlong_penalty_factor=algorithm.overlong_penalty_factor,
        )


async def read_sequences(
    bus: LogBus,
    subjects: Subjects,
    groups: Sequence[Group],
    *,
    plan: CreditPlan,
    temperature: float,
    archive: Path | None = None,
    runtime: Runtime | None = None,
    images: ImageReader | None = None,
    trainer: Trainer | None = None,
) -> list[TrainingSequence]:
    """The leaves of the graded episodes of ``groups`` as training sequences, in a fixed order; raises `MissingActions`.

    A learner that had to begin at a checkpoint before the newest one needs again what was trimmed since: from ``archive``.
    Episodes whose Actions the log has lost, do not fit their result or are not what ``trainer`` can be given (ids, images), or
    that were shown images which ``images`` cannot read, leave their group, with the reason. Raises `UserError` if no image of a
    batch is for the trainer what it was for the sampler.
    """
    runtime = runtime or Runtime()
    actions = await _read_actions(bus, subjects, groups, archive=archive, runtime=runtime)
    _exclude_broken(groups, actions, trainer.vocabulary if trainer else 0)
    shown = await read_images(images, groups, actions)
    if trainer is not None:
        await exclude_mismatched(trainer, groups, actions, shown, runtime)
    leaves = _list_leaves(groups, actions)
    usable = [result for group in groups for result in group.graded]
    sequences: list[TrainingSequence] = []
    for result, advantages in zip(usable, compute_episode_advantages(groups, plan), strict=True):
        whole = build_sequence(result, actions[result.episode_id], advantages, plan, temperature)
        whole = msgspec.structs.replace(whole, images=shown.get(result.episode_id, ()))
        sequences += split_sequence(whole, leaves[result.episode_id])
    return sequences


async def _read_actions(
    bus: LogBus, subjects: Subjects, groups: Sequence[Group], *, archive: Path | None, runtime: Runtime
) -> dict[str, list[Action]]:
    results = {result.episode_id: result for group in groups for result in group.graded}
    found, missing = await find_actions(bus, subjects, list(results.values()), archive=archive, runtime=runtime)
    for each in missing:
        is_before = each.sequence <= results[each.episode_id].request_sequence
        if not is_before and not await are_lost(bus, subjects, each):
            raise each
        _exclude(groups, each.episode_id, "actions_lost", str(each))
    return found


def _exclude_broken(groups: Sequence[Group], actions: Mapping[str, Sequence[Action]], vocabulary: int) -> None:
    for result in [result for group in groups for result in group.graded]:
        if problem := find_actions_problem(result, actions[result.episode_id], vocabulary=vocabulary):
            _exclude(groups, result.episode_id, "actions_broken", problem)


def _exclude(groups: Sequence[Group], episode_id: str, error_class: str, reason: str) -> None:
    for group in groups:
        if episode_id in group.results:
            group.unusable[episode_id] = error_class
            log.error(
                "actions cannot be trained; excluding the episode",
                episode=episode_id,
                deadline_ns=group.deadlines_ns.get(episode_id),
                error_class=error_class,
                reason=reason,
            )


def _list_leaves(groups: Sequence[Group], actions: Mapping[str, Sequence[Action]]) -> dict[str, tuple[Leaf, ...]]:
    """The leaves of each graded episode; an episode whose turns are no tree leaves its group, with the reason."""
    leaves = {}
    for group in groups:
        for result in group.graded:
            try:
                leaves[result.episode_id] = list_leaves(actions[result.episode_id], result.unrewarded_turns)
            except SegmentError as error:
                _exclude([group], result.episode_id, "segments_broken", str(error))
    return leaves


def compute_episode_advantages(groups: Sequence[Group], plan: CreditPlan) -> list[list[float]]:
    """The advantage of every turn of every graded episode of ``groups``, in their order.

    What is compared within a group is an episode's reward, which is its total, or where it has seats each seat's reward with
    that of the same seat. With credit per turn, what turns were not rewarded of it comes with the last of them. Turns of a seat
    without a reward have 0.
    """
    results = [result for group in groups for result in group.graded]
    parts = list_parts(groups)
    rewards = [part.reward + _penalise_length(results[part.episode], plan) for part in parts]
    numbers = [part.group for part in parts]
    if plan.credit_assignment == "turn":
        by_turn = [
            _credit_turns(results[part.episode], part, reward, plan) for part, reward in zip(parts, rewards, strict=True)
        ]
        if plan.advantage_estimator != "gae":
            normalise = plan.advantage_estimator == "grpo"
            by_turn = compute_turn_advantages(by_turn, numbers, minimum=plan.minimum, normalise=normalise)
    else:
        estimate = load_advantage(plan.advantage) if plan.advantage else ADVANTAGES[plan.advantage_estimator]
        values = estimate(np.array(rewards, dtype=np.float64), np.array(numbers), minimum=plan.minimum)
        by_turn = [[float(value)] * len(part.turns) for value, part in zip(values, parts, strict=True)]
    advantages: list[dict[int, float]] = [{} for _ in results]
    for part, of_part in zip(parts, by_turn, strict=True):
        advantages[part.episode].update(zip(part.turns, of_part, strict=True))
    return [
        [of_turns.get(turn, 0.0) for turn in range(len(result.actions))]
        for result, of_turns in zip(results, advantages, strict=True)
    ]


def _credit_turns(result: EpisodeFinished, part: RewardedPart, reward: float, plan: CreditPlan) -> list[float]:
    rewards = [result.turn_rewards[turn] for turn in part.turns if turn < len(result.turn_rewards)]
    unpaid = unpaid_reward(reward, rewards)
    return compute_turn_returns(rewards, unpaid, turns=len(part.turns), discount=plan.turn_discount)


def _penalise_length(result: EpisodeFinished, plan: CreditPlan) -> float:
    return overlong_penalty(
        result.tokens, limit=plan.overlong_limit, buffer=plan.overlong_buffer, factor=plan.overlong_penalty_factor
    )


def build_sequence(
    result: EpisodeFinished, actions: Sequence[Action], by_turn: Sequence[float], plan: CreditPlan, temperature: float
) -> TrainingSequence:
    """The arrays over the tokens of all turns; for an episode of one segment, what is trained of it. Raises `ValueError` or
    `IndexError` if the result does not fit its Actions."""
    ids = np.frombuffer(b"".join(action.prompt_delta + action.sampled for action in actions), "<u4").astype(np.int32)
    if result.tokens != len(ids):
        raise ValueError(f"the result counts {result.tokens} tokens, its Actions have {len(ids)}")
    mask = np.unpackbits(np.frombuffer(result.loss_mask, np.uint8), count=result.tokens, bitorder="little").astype(bool)
    untrained = {each.turn for each in result.untrained}
    trained = [action for turn, action in enumerate(actions) if turn not in untrained]
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = np.frombuffer(b"".join(action.logprobs for action in trained), "<f4")
    versions = np.full(len(ids), -1, np.int32)
    versions[mask] = np.concatenate([np.zeros(0, np.int32), *map(_expand_versions, trained)])
    advantages = spread_advantages(mask, by_turn, count_trained(result, actions))
    if is_masked(plan.truncation_mask, result.outcome, find_last_finish(result, actions)):
        mask, advantages = np.zeros_like(mask), np.zeros_like(advantages)
    return TrainingSequence(
        episode_id=result.episode_id,
        group_id=result.group_id,
        ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, np.float32(0)),
        advantages=advantages,
        versions=np.where(mask, versions, np.int32(-1)),
        temperature=temperature or 1.0,
    )


def count_trained(result: EpisodeFinished, actions: Sequence[Action]) -> tuple[int, ...]:
    """Number of tokens of each turn that are trained: those that it sampled, or none."""
    untrained = {each.turn for each in result.untrained}
    return tuple(0 if turn in untrained else len(action.sampled) // 4 for turn, action in enumerate(actions))


def spread_advantages(mask: NDArray[np.bool_], by_turn: Sequence[float], sampled: Sequence[int]) -> NDArray[np.float32]:
    """One advantage per token from one per turn, of which each sampled so many tokens; 0 where ``mask`` is False."""
    advantages = np.zeros(len(mask), np.float32)
    advantages[mask] = np.repeat(np.array(by_turn, np.float32), sampled)
    return advantages


def _expand_versions(action: Action) -> NDArray[np.int32]:
    """The version that sampled each token of one Action; -1 if weights were swapped within it, for then its later tokens
    were sampled upon keys and values of the version before, and no single version made them."""
    version = action.versions[0].version if len(action.versions) == 1 else -1
    return np.full(len(action.sampled) // 4, version, np.int32)
