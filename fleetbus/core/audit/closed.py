"""Books of what the floor has passed: sums instead of episodes, so that an audit's memory follows what is open. Pure."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from fleetbus.core.audit.episode import EpisodeAudit
from fleetbus.core.audit.findings import Attempts


class ClosedBooks(msgspec.Struct):
    """Sums over episodes that were settled for good."""

    requested: int = 0
    evaluation: int = 0
    finished: int = 0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    attempts: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, episode: EpisodeAudit, *, is_settled: bool) -> None:
        """One episode; what training settled is counted with its step."""
        self.requested += 1
        self.outcomes[episode.outcome or ""] += episode.outcome is not None and not episode.is_share
        self.attempts += count_attempts([episode])
        if episode.split == "eval":
            self.evaluation += 1
        elif not is_settled:
            self.finished += 1


def count_attempts(episodes: Iterable[EpisodeAudit]) -> Counter[str]:
    """Claims by what became of them. One is finished when a result ended it, superseded when another followed without a
    release."""
    counts: Counter[str] = Counter()
    for episode in (each for each in episodes if not each.is_share):
        counts["started"] += episode.attempts
        counts["released"] += episode.released
        counts["finished"] += episode.holding and episode.result_sequence > 0
        counts["in_flight"] += episode.holding and not episode.result_sequence
    return counts


def sum_attempts(counts: Counter[str]) -> Attempts:
    """The attempts of a report: what neither ended nor runs was superseded."""
    ended = counts["finished"] + counts["released"] + counts["in_flight"]
    return Attempts(
        started=counts["started"],
        finished=counts["finished"],
        released=counts["released"],
        superseded=counts["started"] - ended,
        in_flight=counts["in_flight"],
    )
