"""Handles one delivered request: look, then claim, play and store the result (docs/concepts/delivery.md, rules 1, 2, 5, 9).

Claims on ``episode.<episode>`` alone decide who runs an episode: a delivery is never trusted to be the first or the only one,
and a request is acked only when a result stands in the log. A superseded attempt lets its lease run out: a nak would take the
request away from the worker that now holds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Delivery
from fleetbus.concurrency.deadlines import Deadlines
from fleetbus.core.episode.claim_seals import make_seal
from fleetbus.core.episode.claims import EpisodeState, build_result_without_attempt
from fleetbus.core.episode.history import Turn
from fleetbus.core.training.floor import NO_FLOOR, refuses_delivery
from fleetbus.delivery.cancel import describe_author
from fleetbus.delivery.leases import Leases
from fleetbus.errors import LogFull, LogLost, PublishUnanswered, RequestUnanswered, SequenceConflict
from fleetbus.log.episodes import RETRY_SECONDS, read_answered_observations, read_episode_state, read_turns, store_result
from fleetbus.log.floor import read_floor_after
from fleetbus.logs.trace_context import name_episode
from fleetbus_schemas import (
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    MalformedMessage,
    Outcome,
    decode,
    encode,
)
from fleetbus_workers.environment.base import LimitsTurns, LivesElsewhere, RecordedTurn, ShowsWhole
from fleetbus_workers.environment.episode.first_failures import FirstFailures
from fleetbus_workers.environment.episode.lane_status import LaneStatus
from fleetbus_workers.environment.episode.late_answers import check_late_answers
from fleetbus_workers.environment.episode.policy_client import PolicyClient
from fleetbus_workers.environment.episode.runner import EpisodeRunner
from fleetbus_workers.environment.episode.running_attempt import RunningAttempt, describe_expiry
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages, Superseded
from fleetbus_workers.environment.worker_context import WorkerContext

CLAIM_RETRY_SECONDS = 1.0
RELEASE_SECONDS = 5.0

FINAL_ATTEMPT_RETRY_SECONDS = 1.0
FINAL_ATTEMPT_SLOT_SHARE = 8
"""One slot in so many is for episodes that one more loss would make poison: what kills a worker takes few of them along.

One of them may be what killed the workers before, and the others only ran beside it.
"""

log = structlog.get_logger()


class Attempts:
    """The attempts of one worker, by episode."""

    def __init__(self, context: WorkerContext, leases: Leases, counters: defaultdict[str, float]) -> None:
        self._context = context
        self._bus = context.bus
        self._subjects = context.subjects
        self._leases = leases
        self._counters = counters
        self._running: dict[str, RunningAttempt] = {}
        self._final_attempts = 0
        self._first_failures = FirstFailures()
        self.deadlines = Deadlines()
        self._closed = False
        self._floor = NO_FLOOR
        """As it was when it was read last; it only rises."""
        self.lane_status = LaneStatus(context.bus, context.subjects, self.recheck)

    @property
    def episodes(self) -> tuple[str, ...]:
        """Episodes in work."""
        return tuple(self._running)

    def deliver(self, sequence: int, action: Action) -> None:
        """Deliver an Action to the attempt that waits for it; without one it is dropped."""
        running = self._running.get(action.episode_id)
        if running is not None and running.policy_client is not None:
            running.policy_client.deliver(sequence, action)

    async def watch_late_answers(self) -> None:
        """Look for the Actions that attempts have waited too long for; runs until cancelled, one timer for all."""
        while True:
            await anyio.sleep(self._context.limits.late / 2)
            now, waiting = anyio.current_time(), (running.policy_client for running in self._running.values())
            late = [client for client in waiting if client is not None and client.is_late(now)]
            await check_late_answers(self._bus, self.lane_status, late, now)

    def recheck(self, lane: str) -> None:
        """An inference worker drains: attempts that wait on its lane check the log at once."""
        for running in self._running.values():
            if running.policy_client is not None and running.policy_client.lane_in_use == lane:
                running.policy_client.recheck()

    def cancel(self, episodes: Sequence[str], author: str) -> list[str]:
        """End these episodes as ``cancelled``, which ``author`` asks for; returns those that run here."""
        found = [episode for episode in episodes if episode in self._running]
        for episode in found:
            self._running[episode].cancelled_by = author
            self._running[episode].stop()
        return found

    def release_all(self) -> None:
        """Stop all running attempts and release them, so that other workers continue at once; start no more."""
        self._closed = True
        for running in tuple(self._running.values()):
            running.handed_back = True
            running.stop()

    async def handle_request(self, delivery: Delivery) -> None:
        """Look before working: a result, an own session, or else an attempt to be run here."""
        if (running := await self._admit(delivery)) is None:
            return
        runner: EpisodeRunner | None = None
        structlog.contextvars.bind_contextvars(attempt=running.attempt)
        try:
            try:
                with running.enter(anyio.CancelScope()):
                    runner = await self._start_attempt(running)
                if runner is not None and (result := await runner.play()) is not None:
                    with running.enter(anyio.CancelScope()):
                        result = msgspec.structs.replace(result, opens=running.secret)
                        await self._finish(result, running.claim_sequence)
            except Superseded as superseded:
                self._count_superseded(superseded)
            await self._handle_stop(running)
        finally:
            await self._end(running)

    async def _admit(self, delivery: Delivery) -> RunningAttempt | None:
        """An attempt that is to be run here, or None."""
        message = delivery.message
        try:
            request = decode(EpisodeRequested, message.payload, subject=message.subject)
            if message.subject.rpartition(".")[2] != request.episode_id:
                raise MalformedMessage(message.subject, "its episode id differs from that of its subject")
        except MalformedMessage as malformed:
            self._counters["malformed"] += 1
            log.error("request is malformed; acknowledging it unprocessed", reason=str(malformed))
            await delivery.ack()
            return None
        structlog.contextvars.bind_contextvars(**name_episode(request))
        episode_state = await read_episode_state(self._bus, self._subjects, request.episode_id)
        if episode_state.result is not None or await self._is_below_floor(request, delivery):
            await delivery.ack()
            return None
        running = self._running.get(request.episode_id)
        if running is not None:
            if running.claim is None or not episode_state.ends(running.claim):
                self._leases.hold(request.episode_id, delivery)
                delivery.forget_message()
                return None
            running.stop()
            await running.wait_until_ended()
        if self._closed:
            await delivery.nak()
            return None
        if request.episode_id in self._running:
            return None
        is_final = episode_state.is_on_last_attempt(self._context.settings.max_attempts)
        if is_final and self._final_attempts >= max(self._context.settings.slots // FINAL_ATTEMPT_SLOT_SHARE, 1):
            await delivery.nak(FINAL_ATTEMPT_RETRY_SECONDS)  # it has its last chance, and others have theirs here at the moment
            return None
        self._final_attempts += is_final
        running = RunningAttempt(request, message.sequence, self._context.nonce(), episode_state, is_final=is_final)
        self._running[request.episode_id] = running
        self._leases.hold(request.episode_id, delivery)
        delivery.forget_message()
        return running

    async def _end(self, running: RunningAttempt) -> None:
        episode = running.request.episode_id
        running.mark_ended()
        del self._running[episode]
        self._final_attempts -= running.is_final
        held = self._leases.take(episode)
        if held is not None and running.nak_delay_seconds is not None:
            await held.nak(running.nak_delay_seconds)

    async def _is_below_floor(self, request: EpisodeRequested, delivery: Delivery) -> bool:
        """True if the floor refuses it by what is known here; a claim will tell for sure, where one follows."""
        message = delivery.message
        if request.deadline_ns <= self._bus.now_ns():
            self._floor = await read_floor_after(self._bus, self._subjects, message.subject, message.sequence)
        return refuses_delivery(self._floor, request, message.sequence)

    async def _start_attempt(self, running: RunningAttempt) -> EpisodeRunner | None:
        """The attempt, claimed; None if there is nothing to be played."""
        request, episode_state, context = running.request, running.take_state(), self._context
        remaining_seconds = (request.deadline_ns - self._bus.now_ns()) / 1e9
        deadline = self.deadlines.open(self.deadlines.now() + remaining_seconds)
        if episode_state.is_poison(context.settings.max_attempts):
            await self._conclude(running, episode_state, "lost", "poison")
            return None
        if remaining_seconds <= 0:
            await self._conclude(running, episode_state, "timeout", "episode_timeout", describe_expiry(episode_state))
            return None
        try:
            with Stages().time_limit("make", context.limits.open):
                environment = context.make(request.task)
        except EpisodeEnded as ended:
            where, traceback = ended.location, self._first_failures.describe(ended)
            failure = (ended.outcome, ended.error_class, ended.error)
            await self._conclude(running, episode_state, *failure, location=where, traceback=traceback)
            return None
        episode, bus, subjects = request.episode_id, self._bus, self._subjects
        recorded = await read_turns(bus, subjects, episode, episode_state) if environment.replayable else ()
        running.claim = claim = AttemptStarted(
            episode_id=request.episode_id,
            attempt=episode_state.attempts + 1,
            worker=context.worker,
            nonce=running.nonce,
            seal=make_seal(running.secret),
            lane=context.lane,
            reason=episode_state.next_reason,
            resumed_at_turn=len(recorded),
            request_sequence=running.sequence,
        )
        claim_sequence = await self._claim(running, claim, episode_state)
        if claim_sequence is None or await self._drop_below_floor(running, claim_sequence):
            return None
        running.claim_sequence = claim_sequence
        running.policy_client = await self._build_policy_client(request, claim, claim_sequence, recorded)
        running.policy_client.limited_by = environment if isinstance(environment, LimitsTurns) else None
        observed = await read_answered_observations(bus, subjects, request.policies, episode, recorded)
        if isinstance(environment, LivesElsewhere):
            turns = [RecordedTurn(observed[turn.action.turn], turn.action) for turn in recorded if turn.action.turn in observed]
            environment.assign(request, claim.attempt, turns)
        return EpisodeRunner(
            request=request,
            claim=claim,
            environment=environment,
            policy_client=running.policy_client,
            recorded=recorded,
            observed=observed,
            deadline=running.enter(deadline),
            settings=context.settings,
            limits=context.limits,
            context_tokens=context.context_tokens,
            examples=() if isinstance(environment, ShowsWhole) else context.examples,
            counters=self._counters,
            first_failures=self._first_failures,
        )

    async def _drop_below_floor(self, running: RunningAttempt, claim_sequence: int) -> bool:
        """Ack the request if the claim came after the episode had been settled for good; return it if the claim is lost."""
        subject = self._subjects.episode(running.request.episode_id)
        try:
            self._floor = await read_floor_after(self._bus, self._subjects, subject, claim_sequence)
        except LogLost as lost:
            log.warning("the claim is lost; returning the request", reason=str(lost))
            running.nak_delay_seconds = CLAIM_RETRY_SECONDS
            return True
        if not refuses_delivery(self._floor, running.request, running.sequence):
            return False
        log.warning("request is below the floor of the log; dropping it", request_sequence=running.sequence)
        self._counters["refused"] += 1
        await self._ack(running.request.episode_id)
        return True

    async def _build_policy_client(
        self, request: EpisodeRequested, claim: AttemptStarted, claim_sequence: int, recorded: Sequence[Turn]
    ) -> PolicyClient:
        """An earlier attempt may have used this very lane, so the last Action there is looked up."""
        subject = self._subjects.action(claim.lane, request.episode_id)
        last_action = await self._bus.last(subject) if claim.attempt > 1 else None
        return PolicyClient(
            self._context,
            self.lane_status,
            request=request,
            claim=claim,
            claim_sequence=claim_sequence,
            history=tuple(recorded),
            action_sequence=last_action.sequence if last_action else 0,
        )

    async def _claim(self, running: RunningAttempt, claim: AttemptStarted, episode_state: EpisodeState) -> int | None:
        """Store the claim; None if another worker wrote first, or if that is unknown and the request is returned."""
        subject = self._subjects.episode(claim.episode_id)
        try:
            return (await self._bus.publish(subject, encode(claim), expected_last=episode_state.last_sequence)).sequence
        except (SequenceConflict, PublishUnanswered, LogFull):
            self._counters["claims_refused"] += 1
            now = await read_episode_state(self._bus, self._subjects, claim.episode_id)
            if now.is_held_by(claim.nonce):
                return now.claim_sequence
            if now.result is not None:
                await self._ack(claim.episode_id)
            elif now.attempts == episode_state.attempts:  # otherwise a nak would take the request from the worker that claimed
                running.nak_delay_seconds = CLAIM_RETRY_SECONDS
            return None

    async def _conclude(
        self,
        running: RunningAttempt,
        episode_state: EpisodeState,
        outcome: Outcome,
        error_class: str,
        error: str = "",
        *,
        location: str = "",
        traceback: str = "",
    ) -> None:
        """A result without an own attempt: it expects the last entry that was read."""
        result = build_result_without_attempt(
            running.request,
            running.sequence,
            episode_state,
            worker=self._context.worker,
            outcome=outcome,
            error_class=error_class,
            error=error,
        )
        result = msgspec.structs.replace(result, error_location=location, traceback=traceback)
        await self._finish(result, episode_state.last_sequence)

    async def _finish(self, result: EpisodeFinished, expected_last: int) -> None:
        """Store the result, then ack: in this order, so that a crash between them repeats nothing."""
        store_outcome = await store_result(self._bus, self._subjects, result, expected_last=expected_last)
        if store_outcome == "superseded":
            raise Superseded(f"attempt {result.attempt} of {result.episode_id} finished after it was replaced")
        if store_outcome == "stored":
            self._count(result)
        await self._ack(result.episode_id)

    async def _ack(self, episode: str) -> None:
        delivery = self._leases.take(episode)
        if delivery is not None:
            await delivery.ack()

    async def _handle_stop(self, running: RunningAttempt) -> None:
        """Handle a stop: store ``cancelled`` if that was requested, release the attempt if the worker drains."""
        try:
            if running.cancelled_by is not None:
                await self._store_cancelled(running)
            elif running.handed_back:
                await self._release_attempt(running)
        except Superseded as superseded:
            self._count_superseded(superseded)

    def _count_superseded(self, superseded: Superseded) -> None:
        self._counters["superseded"] += 1
        log.info("attempt is superseded; stopping it", reason=str(superseded))

    async def _store_cancelled(self, running: RunningAttempt) -> None:
        """However long the log is away, and even if a replica did not show a claim: an order was promised to be followed.

        Raises what went wrong when this worker is leaving, or the deadline has passed and the requester closes the episode.
        """
        request = running.request
        while True:
            try:
                episode_state = await read_episode_state(self._bus, self._subjects, request.episode_id)
                if episode_state.result is None:
                    await self._conclude(
                        running, episode_state, "cancelled", "cancelled", describe_author(running.cancelled_by or "")
                    )
                else:
                    await self._ack(request.episode_id)
                return
            except (Superseded, RequestUnanswered) as error:
                if self._closed or self._bus.now_ns() >= request.deadline_ns:
                    raise
                log.warning("cancelled result not stored; retrying", reason=str(error))
                await anyio.sleep(RETRY_SECONDS)

    async def _release_attempt(self, running: RunningAttempt) -> None:
        episode = running.request.episode_id
        episode_state = await read_episode_state(self._bus, self._subjects, episode)
        newest = episode_state.newest
        if newest is None:
            running.nak_delay_seconds = 0.0
        if newest is None or not episode_state.is_held_by(running.nonce):
            return
        running.nak_delay_seconds = 0.0
        release = AttemptReleased(episode_id=episode, attempt=newest.attempt, worker=self._context.worker)
        await self._bus.publish(
            self._subjects.episode(episode), encode(release), expected_last=episode_state.last_sequence, timeout=RELEASE_SECONDS
        )
        self._counters["handed_back"] += 1

    def _count(self, result: EpisodeFinished) -> None:
        self._counters["episodes"] += 1
        self._counters[f"outcome_{result.outcome}"] += 1
        self._counters["turns"] += result.turns
        self._counters["tool_errors"] += result.tool_errors
        for stage, seconds in result.timings.items():
            self._counters[f"seconds_{stage}"] += seconds
        log.debug("episode finished", outcome=result.outcome, reward=result.reward, turns=result.turns)
