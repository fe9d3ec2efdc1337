"""Faults to plant into turns that are sampled side by side. See `tests/system/test_simulation_planted_faults.py`."""

from __future__ import annotations

import msgspec
import pytest

import fleetbus_workers.environment.episode.runner as runner
from fleetbus.core.episode.history import Turn
from fleetbus_schemas import Action, ChatMessage, Observation
from fleetbus_workers.environment.episode.segments import Placement
from fleetbus_workers.environment.episode.sent_ahead import SentAhead, SentTurn
from fleetbus_workers.inference.observation_handler import ObservationHandler
from fleetbus_workers.inference.turn_order import TurnOrder


def answers_exchanged(patch: pytest.MonkeyPatch) -> None:
    """Of the answers that came early, a turn has the one that came last."""
    take = SentAhead.take

    def faulty(self: SentAhead, observation: Observation) -> tuple[SentTurn | None, Turn | None]:
        latest = next(reversed(self._early.values()), None)
        sent, answer = take(self, observation)
        return sent, answer if answer is None else latest

    patch.setattr(SentAhead, "take", faulty)


def tokens_of_another_turn(patch: pytest.MonkeyPatch) -> None:
    """A turn that was sent ahead is stored with what the turn before it was answered."""
    store, stored = ObservationHandler._store_action, dict[tuple[str, int, int], Action]()

    async def faulty(self: ObservationHandler, observation: Observation, action: Action) -> bool:
        stored[action.episode_id, action.attempt, action.turn] = action
        before = stored.get((action.episode_id, action.attempt, action.turn - 1))
        if observation.ahead and before is not None:
            action = msgspec.structs.replace(action, sampled=before.sampled, text=before.text)
        return await store(self, observation, action)

    patch.setattr(ObservationHandler, "_store_action", faulty)


def answer_lost_in_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """An attempt that takes over passes over a turn that was sent ahead."""
    find = runner.EpisodeRunner._find_recorded

    def faulty(self: runner.EpisodeRunner, messages: tuple[ChatMessage, ...], placement: Placement) -> Turn | None:
        recorded = find(self, messages, placement)
        before = self._observed.get(self.turn)
        is_followed = self.turn + 1 < len(self._recorded)
        return self._recorded[self.turn + 1] if before is not None and before.ahead and is_followed else recorded

    patch.setattr(runner.EpisodeRunner, "_find_recorded", faulty)


def turn_before_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """An Action is stored as soon as it is sampled."""

    async def faulty(self: TurnOrder, observation: Observation, subject: str, *, longest_seconds: float = 0.0) -> int:
        return (await self._look(observation, subject))[0]

    patch.setattr(TurnOrder, "wait", faulty)
