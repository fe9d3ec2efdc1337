"""Episodes that the learners of several policies train: an account of its own for each further one. Pure.

Such an episode is settled once for each of them, so the books count it as often. The account of a further policy has an id of
its own, and takes from the episode what settling depends on: where it was requested, and how it ended for that policy's seats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from fleetbus.core.audit.episode import EpisodeAudit
from fleetbus.core.audit.findings import Findings
from fleetbus.core.audit.training import TrainingAudit
from fleetbus_schemas import (
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Exclusion,
    Message,
    StepTrained,
    TrainingFinished,
)

Settling = TypeVar("Settling", StepTrained, TrainingFinished)


def name_share(episode_id: str, policy: str) -> str:
    """The id of the account of a further policy, which no episode can have."""
    return f"{episode_id}@{policy}"


def apply_to_shares(episodes: dict[str, EpisodeAudit], episode: EpisodeAudit, sequence: int, message: Message) -> None:
    """Keep the further accounts of an episode, after ``message`` was applied to it."""
    if isinstance(message, EpisodeRequested) and episode.requested == sequence:
        episodes |= {share.episode_id: share for share in _open_shares(episode)}
    for policy in episode.sharers:
        share = episodes.get(name_share(episode.episode_id, policy))
        if share is None:
            continue
        if isinstance(message, AttemptStarted | AttemptReleased):
            share.holding = episode.holding
        elif isinstance(message, EpisodeFinished) and episode.result_sequence == sequence:
            share.result_sequence, share.outcome, share.forged = sequence, episode.outcome, episode.forged
            share.take_reward(message)


def _open_shares(episode: EpisodeAudit) -> Iterator[EpisodeAudit]:
    for policy in episode.sharers if episode.split == "train" and episode.lineage else ():
        yield EpisodeAudit(
            episode_id=name_share(episode.episode_id, policy),
            requested=episode.requested,
            split=episode.split,
            policy=policy,
            group_id=episode.group_id,
            group_size=episode.group_size,
            lineage=episode.lineage,
            is_share=True,
        )


def is_left(episode: EpisodeAudit, trainings: Mapping[str, TrainingAudit]) -> bool:
    """True for the account of a policy whose training has finished: nobody is to settle it any more."""
    return episode.is_share and episode.policy in trainings and trainings[episode.policy].is_over


def list_left(episodes: Mapping[str, EpisodeAudit], trainings: Mapping[str, TrainingAudit]) -> Iterator[str]:
    """The ids of those accounts."""
    return (account for account, episode in episodes.items() if is_left(episode, trainings))


def rename_settled(
    entry: Settling, policy: str, episodes: Mapping[str, EpisodeAudit], sequence: int, findings: Findings
) -> Settling:
    """An entry of the learner of ``policy`` with the ids of its accounts; who has none may not settle an episode."""

    def rename(episode_id: str) -> str:
        episode = episodes.get(episode_id)
        if episode is None or episode.policy == policy:
            return episode_id
        if policy in episode.sharers:
            return name_share(episode_id, policy)
        findings.add("settled_elsewhere", f"{episode_id}-by-{policy}", sequence)
        return episode_id

    excluded = tuple(Exclusion(episode_id=rename(each.episode_id), reason=each.reason) for each in entry.excluded)
    if isinstance(entry, TrainingFinished):
        return msgspec.structs.replace(entry, excluded=excluded)
    return msgspec.structs.replace(
        entry,
        episodes=tuple(map(rename, entry.episodes)),
        excluded=excluded,
        rewards={rename(each): reward for each, reward in entry.rewards.items()},
        scores={rename(each): score for each, score in entry.scores.items()},
    )
