"""Faults to plant into the roles that play episodes. See `tests/system/test_simulation_planted_faults.py`."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

import fleetbus.delivery.lanes
import fleetbus.delivery.requests
import fleetbus.delivery.slots
import fleetbus.log.episodes
import fleetbus_workers.environment.episode.attempts as attempts
import fleetbus_workers.environment.episode.policy_client as exchange
import fleetbus_workers.environment.episode.runner as session
import fleetbus_workers.environment.worker as environment
import fleetbus_workers.inference.history_cache as histories
import fleetbus_workers.inference.observation_handler as answers
import fleetbus_workers.inference.turn_rules as turn_rules
import fleetbus_workers.inference.worker as inference
from fleetbus.bus.streams import tasks_consumer
from fleetbus.core.episode.claims import EpisodeState
from fleetbus.core.episode.late_action import LateFacts
from fleetbus.delivery.leases import Leases
from fleetbus_schemas import Action, AttemptStarted, EpisodeFinished, encode
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages
from tests.simulation.platform.bus import SimulatedBus


def ack_before_result(patch: pytest.MonkeyPatch) -> None:
    finish = attempts.Attempts._finish

    async def faulty(self: attempts.Attempts, result: EpisodeFinished, expected_last: int) -> None:
        await self._ack(result.episode_id)
        await finish(self, result, expected_last)

    patch.setattr(attempts.Attempts, "_finish", faulty)


def no_fencing(patch: pytest.MonkeyPatch) -> None:
    """A superseded attempt goes on, and stores its result after whatever stands there."""
    store = fleetbus.log.episodes.store_result

    async def faulty(bus: Any, subjects: Any, result: EpisodeFinished, *, expected_last: int) -> Any:
        episode_state = await fleetbus.log.episodes.read_episode_state(bus, subjects, result.episode_id)
        if episode_state.result is not None:
            return "finished"
        return await store(bus, subjects, result, expected_last=episode_state.last_sequence)

    patch.setattr(attempts, "store_result", faulty)
    patch.setattr(EpisodeState, "is_held_by", lambda self, nonce: self.result is None)


def deliveries_as_attempts(patch: pytest.MonkeyPatch) -> None:
    """``num_delivered`` is taken for the attempt; a killed server counts from 1 again."""
    delivered: dict[str, int] = {}
    admit = attempts.Attempts._admit

    async def faulty(self: attempts.Attempts, delivery: Any) -> Any:
        running = await admit(self, delivery)
        if running is not None:
            delivered[running.request.episode_id] = delivery.delivered
        return running

    def claim(**fields: Any) -> AttemptStarted:
        return AttemptStarted(**fields | {"attempt": delivered[fields["episode_id"]]})

    patch.setattr(attempts.Attempts, "_admit", faulty)
    patch.setattr(attempts, "AttemptStarted", claim)


def no_compare_and_set_of_results(patch: pytest.MonkeyPatch) -> None:
    async def faulty(bus: Any, subjects: Any, result: EpisodeFinished, *, expected_last: int) -> str:
        await bus.publish(subjects.episode(result.episode_id), encode(result))
        return "stored"

    patch.setattr(attempts, "store_result", faulty)


def no_compare_and_set_of_claims(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: attempts.Attempts, running: Any, claim: AttemptStarted, episode_state: EpisodeState) -> int:
        return (await self._bus.publish(self._subjects.episode(claim.episode_id), encode(claim))).sequence

    patch.setattr(attempts.Attempts, "_claim", faulty)


def claim_without_looking(patch: pytest.MonkeyPatch) -> None:
    """A request is taken for new whenever it comes, as if it had never been delivered before."""
    read = attempts.read_episode_state  # type: ignore[attr-defined]

    async def faulty(bus: Any, subjects: Any, episode: str) -> EpisodeState:
        return EpisodeState() if sys._getframe(1).f_code.co_name == "_admit" else await read(bus, subjects, episode)

    patch.setattr(attempts, "read_episode_state", faulty)


def lease_not_extended(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: Leases) -> None:
        await anyio.sleep_forever()

    patch.setattr(Leases, "run", faulty)


def close_not_shielded(patch: pytest.MonkeyPatch) -> None:
    """What cancels the turns of an attempt cancels its close."""

    async def faulty(self: session.EpisodeRunner) -> None:
        scope = anyio.CancelScope()
        if self._deadline.is_cancelled:
            scope.cancel()
        try:
            with scope, self._stages.time_limit("close", self._limits.close):
                await self._environment.close()
        except EpisodeEnded:
            return

    patch.setattr(session.EpisodeRunner, "_close", faulty)


def result_before_close(patch: pytest.MonkeyPatch) -> None:
    left_open: dict[str, session.EpisodeRunner] = {}
    close, finish = session.EpisodeRunner._close, attempts.Attempts._finish

    async def leave_open(self: session.EpisodeRunner) -> None:
        left_open[self._request.episode_id] = self

    async def faulty(self: attempts.Attempts, result: EpisodeFinished, expected_last: int) -> None:
        await finish(self, result, expected_last)
        if result.episode_id in left_open:
            await close(left_open.pop(result.episode_id))

    patch.setattr(session.EpisodeRunner, "_close", leave_open)
    patch.setattr(attempts.Attempts, "_finish", faulty)


def failure_as_reward_zero(patch: pytest.MonkeyPatch) -> None:
    finish = attempts.Attempts._finish

    async def faulty(self: attempts.Attempts, result: EpisodeFinished, expected_last: int) -> None:
        if result.outcome == "env_failed":
            result = msgspec.structs.replace(result, outcome="completed", reward=0.0)
        await finish(self, result, expected_last)

    patch.setattr(attempts.Attempts, "_finish", faulty)


def one_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    fill = fleetbus.delivery.slots.Slots._run_delivery

    async def faulty(self: fleetbus.delivery.slots.Slots, delivery: Any, subscription: Any) -> None:
        if self.in_flight == 1:
            subscription.grant(1)
        await fill(self, delivery, subscription)

    patch.setattr(fleetbus.delivery.slots.Slots, "_run_delivery", faulty)


def stale_history_accepted(patch: pytest.MonkeyPatch) -> None:
    take_or_rebuild = histories.HistoryCache.take_or_rebuild

    async def faulty(self: histories.HistoryCache, observation: Any) -> histories.History:
        kept = self._entries.get(observation.episode_id)
        if kept is not None and observation.turn:
            return self._entries.pop(observation.episode_id)
        return await take_or_rebuild(self, observation)

    patch.setattr(histories.HistoryCache, "take_or_rebuild", faulty)


def no_compare_and_set_of_actions(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: answers.ObservationHandler, observation: Any, action: Action) -> bool:
        await self._bus.publish(self._subjects.action(observation.environment_lane, observation.episode_id), encode(action))
        return True

    patch.setattr(answers.ObservationHandler, "_store_action", faulty)


def observation_acked_before_its_action(patch: pytest.MonkeyPatch) -> None:
    made = answers.ObservationHandler._build_action

    async def faulty(self: answers.ObservationHandler, observation: Any, delivery: Any) -> Action:
        turn = f"{observation.episode_id}.{observation.attempt}.{observation.turn}"
        await self._ack(f"{turn}.{delivery.message.sequence}")
        return await made(self, observation, delivery)

    patch.setattr(answers.ObservationHandler, "_build_action", faulty)


def late_action_not_looked_up(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: exchange.PolicyClient) -> LateFacts:
        await anyio.lowlevel.checkpoint()
        return LateFacts(is_superseded=False, action_sequence=self._action_sequence)

    patch.setattr(exchange.PolicyClient, "_read_entries", faulty)


def bus_time_of_the_workers_own_clock(patch: pytest.MonkeyPatch) -> None:
    """Each worker believes the clock of its machine, which is wrong by up to five minutes, instead of asking the server's."""
    now_ns = SimulatedBus.now_ns

    def faulty(self: SimulatedBus) -> int:
        return now_ns(self) + int((zlib.crc32(self.worker.encode()) % 601 - 300) * 1e9)

    patch.setattr(SimulatedBus, "now_ns", faulty)


def observation_expired_by_a_clock_that_was_set(patch: pytest.MonkeyPatch) -> None:
    """Every observation is dropped whose deadline has passed by the server's clock, whenever it was asked."""
    answer = answers.ObservationHandler._answer

    async def faulty(self: Any, observation: Any, delivery: Any) -> bool:
        return observation.deadline_ns <= self._bus.now_ns() or await answer(self, observation, delivery)

    patch.setattr(answers.ObservationHandler, "_answer", faulty)


def rejected_version_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inference, "RELOAD_SECONDS", math.inf)


def idle_timer_runs_during_a_step(patch: pytest.MonkeyPatch) -> None:
    """Idleness is counted from the beginning of the last call instead of its end."""
    time_limit = Stages.time_limit

    @contextmanager
    def faulty(self: Stages, stage: str, seconds: float, **options: Any) -> Iterator[None]:
        started = anyio.current_time()
        with time_limit(self, stage, seconds, **options):
            yield
        self.ended_at = started

    patch.setattr(Stages, "time_limit", faulty)


def conflict_taken_for_stored(patch: pytest.MonkeyPatch) -> None:
    """A result that the log refused counts as stored, and its request is acked."""
    patch.setattr(fleetbus.log.episodes, "_classify_conflict", lambda episode_state, result: "stored")


def deadline_ignored(patch: pytest.MonkeyPatch) -> None:
    """Attempts take all the time that they like, and requesters never close an episode."""
    admit = attempts.Attempts._admit

    async def faulty(self: attempts.Attempts, delivery: Any) -> Any:
        running = await admit(self, delivery)
        if running is not None:
            running.request = msgspec.structs.replace(running.request, deadline_ns=running.request.deadline_ns * 2)
        return running

    async def never(self: Any, found: Any = None) -> None:
        await anyio.sleep_forever()

    patch.setattr(attempts.Attempts, "_admit", faulty)
    patch.setattr(fleetbus.delivery.requests.Requests, "close_expired", never)


def drain_ignored(patch: pytest.MonkeyPatch) -> None:
    """A worker that drains waits for its episodes however long they take, and returns none."""

    async def faulty(self: environment.EnvironmentWorker, lifecycle: Any) -> None:
        async with anyio.create_task_group() as group:
            await self._slots.run({tasks_consumer(pool): self._slot_count for pool in self._pools}, self._drain, group)
            await anyio.sleep_forever()

    patch.setattr(environment.EnvironmentWorker, "_work", faulty)


def seed_of_the_first_turn(patch: pytest.MonkeyPatch) -> None:
    """Every turn of an episode is sampled with the same seed."""
    compute = turn_rules.compute_turn_seed

    def faulty(observation: Any) -> int:
        return compute(msgspec.structs.replace(observation, turn=0))

    patch.setattr(answers, "compute_turn_seed", faulty)
