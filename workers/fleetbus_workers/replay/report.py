"""The report of a replay: how much was compared, what was left out and why, and where it differs first."""

from collections import Counter

import msgspec

MAX_SHOWN_CHARACTERS = 400

FORWARD, SCORING = "in bare forward passes", "in scoring, forward passes included"
TRAINING = "in training itself"
"""Parts of a replay's work, as `Report.measured` names them."""

UNLOADED = "versions without weights"
"""How the reason for what was skipped begins that every process of a shared replay finds, and counts alike."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field that a worker published differently. ``message`` names the message, ``field`` the path in it, ``sequence``
    where the recorded one stands; ``context`` are lines about what led there."""

    message: str
    field: str
    recorded: str
    replayed: str
    sequence: int = 0
    episode_id: str = ""
    context: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The difference for people."""
        where = f" (recorded at {self.sequence})" if self.sequence else ""
        shown = [f"{self.message}{where} differs in {self.field}"]
        shown += [f"  recorded: {_short(self.recorded)}", f"  replayed: {_short(self.replayed)}"]
        return shown + [f"  {line}" for line in self.context]


class Report(msgspec.Struct, kw_only=True):
    """A replay of one role. ``compared`` counts messages by type, ``skipped`` what could not be replayed, by reason, ``notes``
    what else is worth knowing; ``measured`` are seconds of parts of the work, added up over the ``jobs`` processes that shared
    it; ``checked`` says how far the check goes, where there are several ways; ``advice`` how to record so that more can be
    compared; ``torn`` what the recording lacks at its end.
    ``recorded_seconds`` is the time that the recording spans, ``seconds`` what the replay took."""

    role: str
    compared: Counter[str] = msgspec.field(default_factory=Counter)
    skipped: Counter[str] = msgspec.field(default_factory=Counter)
    notes: Counter[str] = msgspec.field(default_factory=Counter)
    measured: dict[str, float] = msgspec.field(default_factory=dict)
    differences: list[Difference] = msgspec.field(default_factory=list)
    checked: str = ""
    advice: str = ""
    torn: str = ""
    jobs: int = 1
    recorded_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        """True if something was compared and nothing differs."""
        return not self.differences and sum(self.compared.values()) > 0

    @property
    def first(self) -> Difference | None:
        """The difference that stands first in the recording."""
        return min(self.differences, key=lambda each: each.sequence) if self.differences else None

    def lines(self) -> list[str]:
        """The report for people."""
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.compared.items())) or "nothing"
        faster = f", {self.recorded_seconds / self.seconds:.1f} times as fast as recorded" if self.seconds else ""
        shared = f" by {self.jobs} processes" if self.jobs > 1 else ""
        shown = [f"{self.role}: compared {counts} in {self.seconds:.1f} s{shared}{faster}"]
        shown += [f"  {self.checked}"] if self.checked else []
        shown += [f"  {count:,} {note}" for note, count in sorted(self.notes.items())]
        shown += [f"  {seconds:.1f} s {what}" for what, seconds in sorted(self.measured.items())]
        shown += [f"  not replayed: {count:,} {reason}" for reason, count in sorted(self.skipped.items())]
        shown += [f"  {self.advice}"] if self.advice else []
        if self.first is not None:
            others = len(self.differences) - 1
            shown += self.first.lines() + ([f"and {others} more that differ"] if others else [])
        elif self.same:
            shown.append("replays as recorded")
        else:
            shown.append("nothing could be compared")
        return shown

    def check(self) -> None:
        """Raise `AssertionError` with the first difference, or if there was nothing to compare."""
        if not self.same:
            raise AssertionError("\n".join(self.lines()))


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}… ({len(text)} characters)"
