"""Proves why episodes were left out of training: by their outcome, their age, or their group. Pure.

A learner's word decides what is trained, so its reasons are held against results, versions and the settings that its lineage
began with. What only the learner can know is counted as unproven.
"""

from collections.abc import Container, Iterator, Mapping, Sequence

import msgspec

from fleetbus.core.algorithms.reward_components import NOT_FINITE, OUT_OF_BOUNDS
from fleetbus.core.audit.episode import EpisodeAudit
from fleetbus.core.episode.claim_seals import NOT_OF_CLAIM
from fleetbus.core.training.capacity import lag
from fleetbus.core.training.rewarded_parts import has_no_signal
from fleetbus_schemas import GRADED, Exclusion

OUTCOMES = frozenset({"env_failed", "verifier_unknown", "timeout", "lost", "cancelled"})
"""Reasons that are the outcome of an episode that no verdict grades. An episode may end as stale, too, and a group be it."""

LEARNERS_OWN = frozenset({NOT_FINITE, OUT_OF_BOUNDS, NOT_OF_CLAIM, "lost"})
"""What a learner may find whatever the outcome: rewards that it does not take, a result that left the log unread."""


class Excluding(msgspec.Struct, frozen=True, kw_only=True):
    """One entry that excludes: after ``step`` steps, by a lineage with these settings; ``is_end``: nothing more is trained.
    ``step_of`` says which step made each version, ``void`` which a later lineage went back behind: how old such a version is
    depends on what the checkpoint knows from which that lineage continues. Versions ``unread_below`` were removed from the
    log."""

    step: int
    is_end: bool
    settings: Mapping[str, Mapping[str, bool | int | float | str]]
    step_of: Mapping[int, int]
    void: Container[int] = frozenset()
    unread_below: int = 0


def judge_exclusions(
    excluding: Excluding, exclusions: Sequence[Exclusion], episodes: Mapping[str, EpisodeAudit]
) -> Iterator[tuple[str, bool | None]]:
    """Of each episode that is known whether its reason is founded; None if nothing in the log says."""
    groups: dict[tuple[str, str], list[EpisodeAudit]] = {}
    known = [(each, episodes[each.episode_id]) for each in exclusions if each.episode_id in episodes]
    for each, episode in known:
        groups.setdefault((episode.group_id, each.reason), []).append(episode)
    for each, episode in known:
        if each.reason and episode.requested:
            yield each.episode_id, _is_founded(excluding, each.reason, episode, groups[episode.group_id, each.reason])


def _is_founded(excluding: Excluding, reason: str, episode: EpisodeAudit, members: Sequence[EpisodeAudit]) -> bool | None:
    if episode.outcome is None:
        return False if reason in OUTCOMES else None
    if reason in OUTCOMES or episode.outcome not in GRADED:
        return reason == episode.outcome or (None if reason in LEARNERS_OWN else False)
    learner = excluding.settings.get("learner", {})
    match reason:
        case "training_finished":
            return excluding.is_end
        case _ if reason == NOT_OF_CLAIM:
            return episode.forged
        case "no_tokens":
            return not episode.has_tokens
        case "stale":
            return _is_stale(excluding, learner.get("max_staleness"), members)
        case "group_too_small":
            minimum = learner.get("min_group_size")
            return None if minimum is None else len(members) < float(minimum)
        case "no_signal":
            return has_no_signal([member.seat_rewards or [("", member.reward or 0.0)] for member in members])
    return None


def _is_stale(excluding: Excluding, most: object, members: Sequence[EpisodeAudit]) -> bool | None:
    """A group is as old as its oldest version; it was looked at no later than at this entry."""
    if not isinstance(most, int):
        return None
    versions = [member.oldest_version for member in members if member.oldest_version >= 0]
    if any(version < excluding.unread_below for version in versions):
        return None
    if lag(excluding.step, tuple(excluding.step_of.get(version, 0) for version in versions)) > most:
        return True
    return None if any(version in excluding.void for version in versions) else False
