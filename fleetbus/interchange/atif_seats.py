"""The seats of an episode in ATIF: a trajectory each, the first seat's being the episode's own. Pure.

A seat's trajectory is that of its first segment; its further segments stand beside it, for references are resolved among the
trajectories in the episode's own. An episode without seats is one of a single seat that has no name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetbus.interchange.segment_contents import SegmentContent
from fleetbus.recording.episodes import Transcript, TranscriptTurn
from fleetbus_schemas import NEW_ROOT
from fleetbus_schemas.tokens import count_tokens


class SeatLayout:
    """The place of each segment of an episode. ``answered`` are its turns with an Action, ``prompts`` the packed ids of their
    prompts."""

    def __init__(
        self,
        transcript: Transcript,
        answered: Sequence[TranscriptTurn],
        prompts: Sequence[bytes],
        contents: Sequence[SegmentContent],
    ) -> None:
        self._transcript = transcript
        self._answered = answered
        self._prompts = prompts
        self._contents = contents
        self._seats = [answered[content.turns[0]].seat for content in contents]
        self._homes: dict[str, int] = {}
        for number, seat in enumerate(self._seats):
            self._homes.setdefault(seat, number)

    @property
    def has_seats(self) -> bool:
        return any(self._homes)

    def name_seat(self, segment: int) -> str:
        """The seat that plays in a segment; empty in an episode without seats, or without turns."""
        return self._seats[segment] if self._seats else ""

    def find_home(self, segment: int) -> int:
        """The first segment of the seat that plays in this one."""
        return self._homes[self._seats[segment]]

    def find_referrer(self, content: SegmentContent) -> int:
        """The segment that refers to a further one: for the first of a seat the episode's first one, for others the one that it
        leaves, or in which their seat had played before."""
        assert content.origin is not None
        if self.has_seats and self.find_home(content.number) == content.number:
            return 0
        if content.origin.parent != NEW_ROOT:
            return content.origin.parent
        seat = self.name_seat(content.number)
        before = (turn for turn in reversed(self._answered[: content.after + 1]) if turn.seat == seat)
        return next((turn.action.segment for turn in before if turn.action is not None), 0)

    def find_waiting(self, turn: TranscriptTurn) -> int | None:
        """The segment that a turn without an Action would go on in, as far as is known; None for a seat that never acted."""
        if not self.has_seats:
            return 0
        return max((number for number, seat in enumerate(self._seats) if seat == turn.seat), default=None)

    def find_last(self) -> int:
        """The segment to which what the environment said at the end belongs."""
        if not self.has_seats:
            return max(len(self._contents) - 1, 0)
        last = self._answered[-1].action
        return last.segment if last is not None else 0

    def count_tokens(self, segment: int) -> tuple[int, int]:
        """Prompt tokens and sampled tokens of all turns of the seat that plays in a segment."""
        own = [number for number, turn in enumerate(self._answered) if turn.seat == self.name_seat(segment)]
        sampled = (turn.action.sampled for number in own if (turn := self._answered[number]).action is not None)
        return sum(count_tokens(self._prompts[number]) for number in own), sum(map(count_tokens, sampled))

    def find_policy(self, seat: str) -> str | None:
        """The policy that plays a seat; None where nothing says it."""
        request = self._transcript.request
        return request.find_policy(seat) if request is not None else None

    def describe(self, segment: int) -> dict[str, Any]:
        """The seat that plays in a segment: its policy, and its reward, or why it has none, once there is a result."""
        name, result = self.name_seat(segment), self._transcript.result
        facts: dict[str, Any] = {"seat": name, "policy": self.find_policy(name)}
        for seat in result.seats if result is not None else ():
            if seat.name == name:
                facts |= {"reward": seat.reward} | ({"reason": seat.reason} if seat.reason else {})
                facts |= {"policy_versions": list(seat.versions)} if seat.versions else {}
        return facts

    def describe_all(self, name_trajectory: Sequence[str]) -> list[dict[str, Any]]:
        """All seats in the order in which they first acted, with their tokens and trajectories; empty if there are none."""
        if not self.has_seats:
            return []
        found = []
        for segment in self._homes.values():
            prompt, sampled = self.count_tokens(segment)
            tokens = {"prompt_tokens": prompt, "completion_tokens": sampled}
            found.append(self.describe(segment) | tokens | {"trajectory_id": name_trajectory[segment]})
        return found
