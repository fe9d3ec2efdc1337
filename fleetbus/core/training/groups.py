"""Groups of episodes of one task: who is still out, and what a finished group is worth. Pure.

A group is keyed by its id, never by position: episodes without a verdict leave it and take no part in its mean.
"""

import msgspec

from fleetbus_schemas import GRADED, EpisodeFinished, Exclusion


class Group(msgspec.Struct, kw_only=True):
    """One group while its episodes come in; ``size`` episodes were requested."""

    group_id: str
    size: int
    results: dict[str, EpisodeFinished] = msgspec.field(default_factory=dict)
    deadlines_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """Of the requests of its episodes, as far as they are known: results do not have them."""
    unusable: dict[str, str] = msgspec.field(default_factory=dict)
    """Graded episodes that cannot be trained after all, and why."""
    is_cut: bool = False
    """An episode of it was settled before: the others have lost their baseline."""

    def add(self, result: EpisodeFinished) -> None:
        self.results.setdefault(result.episode_id, result)

    def cut(self) -> None:
        """One of its episodes was settled before, and is waited for no more."""
        self.size -= 1
        self.is_cut = True

    @property
    def complete(self) -> bool:
        return len(self.results) >= self.size

    @property
    def graded(self) -> list[EpisodeFinished]:
        """Results that enter advantages, by episode id, so that order of arrival never matters."""
        if self.is_cut:
            return []
        usable = [result for result in self.results.values() if result.outcome in GRADED and result.reward is not None]
        trainable = [result for result in usable if has_tokens(result) and result.episode_id not in self.unusable]
        return sorted(trainable, key=lambda result: result.episode_id)

    @property
    def excluded(self) -> list[Exclusion]:
        """Results that never enter advantages, with their outcome as the reason."""
        graded = {result.episode_id for result in self.graded}
        return [
            Exclusion(episode_id=episode, reason=self._reason(result))
            for episode, result in sorted(self.results.items())
            if episode not in graded
        ]

    def _reason(self, result: EpisodeFinished) -> str:
        if result.episode_id in self.unusable:
            return self.unusable[result.episode_id]
        if result.outcome not in GRADED:
            return result.outcome
        return "group_cut" if self.is_cut else "no_tokens"

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions of all graded tokens."""
        return tuple(sorted({version for result in self.graded for version in result.policy_versions}))

    def discard(self, reason: str) -> list[Exclusion]:
        """Exclusions of the whole group: ``reason`` for graded results, their own outcome for the others."""
        return [Exclusion(episode_id=result.episode_id, reason=reason) for result in self.graded] + self.excluded


def has_tokens(result: EpisodeFinished) -> bool:
    """True if something of a graded result can be trained: a turn, and where it has seats one of a seat with a reward."""
    return bool(result.actions) and (not result.seats or any(seat.reward is not None for seat in result.seats))
