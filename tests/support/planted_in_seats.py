"""Faults to plant into episodes with several seats. See `tests/system/test_simulation_planted_faults.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

import fleetbus.core.training.rewarded_parts as parts
import fleetbus_workers.environment.episode.policy_client as policy_client
import fleetbus_workers.environment.episode.result as result_of
import fleetbus_workers.environment.episode.runner as runner
from fleetbus.core.episode.history import Turn
from fleetbus_schemas import ChatMessage, ContextChange, EpisodeFinished, EpisodeSeat
from fleetbus_workers.environment.base import Step
from fleetbus_workers.environment.episode.seats import EpisodeSeats


def turn_of_another_seat(patch: pytest.MonkeyPatch) -> None:
    """A turn that gives the turn to somebody else is counted as theirs."""
    append = EpisodeSeats.append

    def faulty(self: EpisodeSeats, turn: int, segment: int, tokens: int = 0) -> None:
        own, names = self.current, list(self._turns)
        self.current = names[0] if names and turn % 3 == 2 else own
        append(self, turn, segment, tokens)
        self.current = own

    patch.setattr(EpisodeSeats, "append", faulty)


def rewards_exchanged(patch: pytest.MonkeyPatch) -> None:
    """Each seat has the reward of the next one."""
    describe = EpisodeSeats.describe

    def faulty(self: EpisodeSeats, rewards: Mapping[str, float | None], shared: float | None) -> tuple[EpisodeSeat, ...]:
        values = list(rewards.values())
        return describe(self, dict(zip(rewards, values[1:] + values[:1], strict=True)), shared)

    patch.setattr(EpisodeSeats, "describe", faulty)


def unrewarded_seat_trained(patch: pytest.MonkeyPatch) -> None:
    """What a seat without a reward sampled stands in the loss mask."""
    patch.setattr(result_of, "add_unseated", lambda untrained, seats: untrained)


def seat_lost_in_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """Turns that an attempt before played are seated by nobody."""
    append = runner.EpisodeRunner._append_turn

    def faulty(self: runner.EpisodeRunner, turn: Turn, messages: tuple[ChatMessage, ...]) -> None:
        seats = self._seats
        if any(turn is each for each in self._recorded):
            self._seats = EpisodeSeats("")
        append(self, turn, messages)
        self._seats = seats

    patch.setattr(runner.EpisodeRunner, "_append_turn", faulty)


def limit_counted_anew_in_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """Turns that an attempt before played do not count for the limits of their seats."""
    append, is_at_limit = runner.EpisodeRunner._append_turn, EpisodeSeats.is_at_limit
    earlier: dict[EpisodeSeats, tuple[EpisodeSeats, Counter[str]]] = {}  # kept, for a number may be another's later

    def count(self: runner.EpisodeRunner, turn: Turn, messages: tuple[ChatMessage, ...]) -> None:
        if any(turn is each for each in self._recorded):
            earlier.setdefault(self._seats, (self._seats, Counter()))[1][self._seats.current] += 1
        append(self, turn, messages)

    def faulty(self: EpisodeSeats) -> bool:
        played = self._turns.get(self.current, [])
        skipped = earlier[self][1][self.current] if self in earlier else 0
        if not skipped:
            return is_at_limit(self)
        self._turns[self.current] = played[skipped:]
        try:
            return is_at_limit(self)
        finally:
            self._turns[self.current] = played

    patch.setattr(runner.EpisodeRunner, "_append_turn", count)
    patch.setattr(EpisodeSeats, "is_at_limit", faulty)


def seat_in_the_context_of_another(patch: pytest.MonkeyPatch) -> None:
    """A seat that acts again goes on in the context of the first one."""
    take = EpisodeSeats.take

    def faulty(self: EpisodeSeats, step: Step) -> ContextChange | None:
        change = take(self, step)
        return change if change is None or change.resume is None else ContextChange(resume=0)

    patch.setattr(EpisodeSeats, "take", faulty)


def seats_compared_with_each_other(patch: pytest.MonkeyPatch) -> None:
    """All seats of a group have one baseline."""
    split = parts._split

    def faulty(result: EpisodeFinished) -> object:
        return [("", turns, reward) for _, turns, reward in split(result)]

    patch.setattr(parts, "_split", faulty)


def reward_of_the_episode_for_each_seat(patch: pytest.MonkeyPatch) -> None:
    split = parts._split
    patch.setattr(parts, "_split", lambda result: split(msgspec.structs.replace(result, seats=())))


def seat_of_another_policy_rewarded(patch: pytest.MonkeyPatch) -> None:
    """What another policy sampled is trained."""
    patch.setattr(EpisodeSeats, "_leave_to_its_policy", lambda self, seat: seat)


def other_policy_forgotten(patch: pytest.MonkeyPatch) -> None:
    """All turns are asked of the policy that is trained."""
    _forget_other(patch, attempts_before=0)


def other_policy_forgotten_in_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """A worker that takes over asks the policy that is trained."""
    _forget_other(patch, attempts_before=1)


def _forget_other(patch: pytest.MonkeyPatch, *, attempts_before: int) -> None:
    ask = policy_client.PolicyClient.ask

    def faulty(self: policy_client.PolicyClient, *arguments: Any, **options: Any) -> object:
        if self._claim.attempt > attempts_before:
            options["seats"] = EpisodeSeats(options["seats"].current)
        return ask(self, *arguments, **options)

    patch.setattr(policy_client.PolicyClient, "ask", faulty)
