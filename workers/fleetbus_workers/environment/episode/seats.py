"""The seats of one attempt: who acts next and in which context, and what each was worth. Pure.

Each seat has a context of its own: its first turn begins with a whole prompt, later ones continue where its last turn was
played. All follows from what the environment says, so that an attempt that takes over seats its turns as the one before it did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from fleetbus.core.episode.history import Turn, list_versions
from fleetbus_schemas import ContextChange, EpisodeSeat, SeatLimit, SeatPolicy, UntrainedTurn
from fleetbus_schemas.seat import MAX_SEATS, SHARED
from fleetbus_workers.environment.base import Ahead, Step
from fleetbus_workers.environment.episode.stages import EpisodeEnded

UNNAMED = "Verdict.seats has no reward for it"
NO_OTHERS: Mapping[str, SeatPolicy] = MappingProxyType({})
UNLIMITED: Mapping[str, SeatLimit] = MappingProxyType({})


class SeatError(ValueError):
    """An environment names seats as it may not."""


class EpisodeSeats:
    """Turns by seat. Without a first seat the episode has none, and all calls say so. ``others`` are policies by the seat that
    they play; those that are not trained are ``frozen``. ``limits`` are those of single seats, by seat."""

    __slots__ = (
        "_limits",
        "_others",
        "_owners",
        "_segments",
        "_tokens",
        "_turns",
        "current",
        "frozen",
        "other",
        "other_tokens",
    )

    def __init__(
        self, first: str, others: Mapping[str, SeatPolicy] = NO_OTHERS, limits: Mapping[str, SeatLimit] = UNLIMITED
    ) -> None:
        self._others = others
        self._seat(first)
        self._limits = limits
        self._tokens: dict[str, int] = {}
        self.other_tokens = 0
        """Tokens of the turns of frozen policies, which do not count as the episode's."""
        self._turns: dict[str, list[int]] = {}
        self._segments: dict[str, int] = {}
        self._owners: dict[int, str] = {}

    def _seat(self, name: str) -> None:
        self.current = name
        self.other = other = self._others.get(name)
        """The other policy that plays the present seat; None if that is the episode's own."""
        self.frozen = None if other is None or other.trained else other
        """That policy if nobody trains it."""

    @property
    def pays_timeouts(self) -> bool:
        """False while a frozen policy is asked, and where others are trained, too: one would pay for another's delay."""
        return self.frozen is None and not any(seat.trained for seat in self._others.values())

    def list_own_versions(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """The versions that sampled the turns of the episode's own policy."""
        others = {turn for seat in self._others for turn in self._turns.get(seat, ())}
        return list_versions(turn for number, turn in enumerate(turns) if number not in others)

    def describe_asked(self, ended: EpisodeEnded) -> str:
        """The other policy that was asked when the attempt ended, if its answer was what it lacked."""
        is_unanswered = ended.outcome == "lost" or ended.error_class in ("action_timeout", "idle_timeout")
        return f" (of the policy {self.other.policy}, seat {self.current})" if self.other and is_unanswered else ""

    def append(self, turn: int, segment: int, tokens: int = 0) -> None:
        """The present seat played ``turn``, in ``segment``, which added so many ``tokens``."""
        if self.current:
            self._turns.setdefault(self.current, []).append(turn)
            self._segments[self.current] = segment
            self._owners[segment] = self.current
            self._tokens[self.current] = self._tokens.get(self.current, 0) + tokens
            if self.frozen:
                self.other_tokens += tokens

    def limit_tokens(self, left: int) -> int:
        """Tokens that the present seat may add where ``left`` are those of others' limits."""
        limit = self._limits.get(self.current)
        if limit is None or limit.max_tokens is None:
            return left
        return min(left, limit.max_tokens - self._tokens.get(self.current, 0))

    def is_at_limit(self) -> bool:
        """True if the present seat may have no further turn."""
        limit = self._limits.get(self.current)
        return limit is not None and (self._is_out_of_turns(limit) or self.limit_tokens(1) < 1)

    def describe_limit(self, left: int) -> tuple[str, str]:
        """Error class and words if the present seat has no further turn for its own limit, the episode having ``left`` tokens;
        both empty if it is for the episode's."""
        limit = self._limits.get(self.current)
        if limit is None or left < 1:
            return "", ""
        name, turn = self.current, len(self._turns.get(self.current, ())) + 1
        if self._is_out_of_turns(limit):
            return (
                "seat_turns",
                f"the seat {name} has had {limit.max_turns} of {limit.max_turns} turns (episode.seat_limits)",
            )
        if limit.max_tokens is None or (self.frozen is None and self.limit_tokens(left) == left):
            return "", ""
        used = f"{self._tokens.get(name, 0):,} of its {limit.max_tokens:,} tokens"
        return "seat_tokens", f"the seat {name} has used {used}, too many for its turn {turn} (episode.seat_limits)"

    def count_turns(self, played: int, most: int) -> tuple[int, int]:
        """Turns of the present seat, and the most that it may have; those of the episode if it has no limit of its own."""
        limit = self._limits.get(self.current)
        if limit is None or limit.max_turns is None:
            return played, most
        return len(self._turns.get(self.current, ())), limit.max_turns

    def _is_out_of_turns(self, limit: SeatLimit) -> bool:
        return limit.max_turns is not None and len(self._turns.get(limit.seat, ())) >= limit.max_turns

    def take(self, step: Step) -> ContextChange | None:
        """Seat who acts after ``step``; the change of context that this asks for, None if it continues. Raises `SeatError`."""
        seat = step.seat or self.current
        change = step.context
        if change is not None and change.resume is not None and self._owners.get(change.resume, seat) != seat:
            owner = self._owners[change.resume]
            raise SeatError(f"the step resumes segment {change.resume} for the seat {seat}, and it is {owner}'s")
        if seat == self.current:
            return None
        if not self.current:
            raise SeatError(f"the step names the seat {seat}, and Start.seat names none")
        if change is not None and change.keep_turns:
            raise SeatError(f"the step gives the turn to the seat {seat} and keeps turns of another: one step does one of them")
        if seat not in self._segments and len(self._segments) == MAX_SEATS:
            raise SeatError(f"the step names the seat {seat}, and {MAX_SEATS} have acted, which is the most")
        self._seat(seat)
        if change is not None:
            return change
        if seat in self._segments:
            return ContextChange(resume=self._segments[seat])
        if not step.messages:
            raise SeatError(f"the seat {seat} acts for the first time, and Step.messages are empty: they are its whole prompt")
        return ContextChange(reason="seat", tools=step.tools)

    def foresee(self, told: Ahead) -> ContextChange | None:
        """The change of context with which a turn begins that was told ahead; None if it has to wait for its turn: another
        policy plays its seat, the seat has limits of its own, or nothing says where it stands."""
        if self.other is not None or told.seat in self._others or told.seat in self._limits:
            return None
        if bool(told.seat) != bool(self.current):
            return None
        if told.context is not None or not told.seat:
            return told.context
        if told.seat in self._segments:
            return ContextChange(resume=self._segments[told.seat])
        return ContextChange(reason="seat", tools=told.tools) if told.seat != self.current else None

    def describe(self, rewards: Mapping[str, float | None], shared: float | None) -> tuple[EpisodeSeat, ...]:
        """The seats as a graded result carries them, in the order in which they first acted. Where none is named, all have the
        episode's reward, ``shared``."""
        if not rewards:
            return self.describe_equal(shared, SHARED)
        seats = (_describe(name, tuple(turns), rewards) for name, turns in self._turns.items())
        return tuple(map(self._leave_to_its_policy, seats))

    def describe_equal(self, reward: float | None, reason: str) -> tuple[EpisodeSeat, ...]:
        """The same where no verdict tells the seats apart."""
        return tuple(
            self._leave_to_its_policy(EpisodeSeat(name=name, turns=tuple(turns), reward=reward, reason=reason))
            for name, turns in self._turns.items()
        )

    def _leave_to_its_policy(self, seat: EpisodeSeat) -> EpisodeSeat:
        if (other := self._others.get(seat.name)) is None:
            return seat
        if other.trained:
            return msgspec.structs.replace(seat, policy=other.policy)
        if other.version is not None:
            reason = f"version {other.version} plays it, which is not trained"
            score = seat.reward if seat.reason != SHARED else None
            return EpisodeSeat(name=seat.name, turns=seat.turns, reason=reason, versions=(other.version,), score=score)
        reason = f"the policy {other.policy} plays it, which is not trained here"
        return EpisodeSeat(name=seat.name, turns=seat.turns, reason=reason)


UNSEATED = EpisodeSeats("")
"""Of every episode without seats: nothing is ever added to it."""


def _describe(name: str, turns: tuple[int, ...], rewards: Mapping[str, float | None]) -> EpisodeSeat:
    reward = rewards.get(name)
    if reward is None:
        reason = "its verdict is None" if name in rewards else UNNAMED
    elif not math.isfinite(reward):
        reward, reason = None, f"its verdict is {reward}, which is no grade"
    else:
        reason = ""
    return EpisodeSeat(name=name, turns=turns, reward=reward, reason=reason)


def add_unseated(untrained: tuple[UntrainedTurn, ...], seats: tuple[EpisodeSeat, ...]) -> tuple[UntrainedTurn, ...]:
    """The turns that are not trained, with those of seats without a reward."""
    turns = {turn: UntrainedTurn(turn=turn, reason="seat") for seat in seats if seat.reward is None for turn in seat.turns}
    turns |= {each.turn: each for each in untrained}
    return tuple(turns[turn] for turn in sorted(turns))


def add_versions(seats: tuple[EpisodeSeat, ...], turns: Sequence[Turn]) -> tuple[EpisodeSeat, ...]:
    """The seats with the versions that sampled those which a policy of their own plays."""
    return tuple(
        msgspec.structs.replace(seat, versions=list_versions(turns[turn] for turn in seat.turns)) if seat.policy else seat
        for seat in seats
    )
