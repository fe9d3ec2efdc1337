"""Episodes that ended without a grade or a turn, by kind of failure, with the first traceback of each: a fold of results."""

import msgspec

from fleetbus_schemas import GRADED, EpisodeFinished, Message

MAX_KINDS = 100
"""Failures of further kinds are counted in no kind; a log with so many has other problems."""

EXPECTED = GRADED | {"cancelled", "stale"}
"""Outcomes of episodes in which nothing failed."""


class FailureKind(msgspec.Struct, kw_only=True):
    """Failures with the same outcome, error class and place. ``error``, ``episode_id`` and ``traceback`` are of the first."""

    outcome: str
    error_class: str
    location: str
    error: str
    episode_id: str
    count: int = 0
    traceback: str = ""

    @property
    def reason(self) -> str:
        """``env_failed ValueError: step: no such room (my_game.py:27 in MyGame.step)``; one line, with any parts."""
        error = self.error.partition("\n")[0]
        named = f"{self.outcome} {self.error_class}" + (f": {error}" if error else "")
        return " ".join((f"{named} ({self.location})" if self.location else named).split())

    @property
    def line(self) -> str:
        return f"{self.count:,} episode{'' if self.count == 1 else 's'} ended {self.reason}"


def is_unplayed(message: EpisodeFinished) -> bool:
    """True if an episode was graded though its first prompt left no room for a turn: no work of the policy is in its grade."""
    return message.outcome == "truncated" and message.error_class == "tokens" and message.turns == 0


class FailureKinds:
    """The kinds of failure of a run, in the order in which they came."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], FailureKind] = {}

    @property
    def kinds(self) -> list[FailureKind]:
        return list(self._kinds.values())

    def apply(self, message: Message) -> None:
        """Take in one entry of the log."""
        if not isinstance(message, EpisodeFinished) or (message.outcome in EXPECTED and not is_unplayed(message)):
            return
        where = message.error_location or message.error.partition(":")[0][:40]
        kind = self._kinds.get(key := (message.outcome, message.error_class, where))
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                return
            kind = self._kinds[key] = FailureKind(
                outcome=message.outcome,
                error_class=message.error_class,
                location=message.error_location,
                error=message.error,
                episode_id=message.episode_id,
            )
        kind.count += 1
        kind.traceback = kind.traceback or message.traceback
