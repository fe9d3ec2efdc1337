"""What may be done about one delivered request: look, then claim, play and store the result (delivery rules 1, 2, 5, 9).

Claims on ``episode.<episode>`` alone decide who runs an episode: a delivery is never trusted to be the first or the only one,
and a request is acked only when a result stands in the log. Whoever is superseded lets its lease run out: a nak would take the
request away from the worker that now holds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Bus, Delivery
from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus.core.claims import Standing, result_without_attempt
from fleetbus.core.history import Turn
from fleetbus.episodes import RETRY_SECONDS, read_observed, read_standing, read_turns, store_result
from fleetbus.errors import LogFull, PublishUnanswered, RequestUnanswered, SequenceConflict
from fleetbus.leases import Leases
from fleetbus_schemas import (
    Action,
    AttemptReleased,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    MalformedMessage,
    Outcome,
    Subjects,
    Task,
    decode,
    encode,
)
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.exchange import Exchange
from fleetbus_workers.environment.routes import Routes
from fleetbus_workers.environment.session import Session
from fleetbus_workers.environment.stages import EpisodeEnded, Stages, Superseded

CLAIM_RETRY_SECONDS = 1.0
GOODBYE_SECONDS = 5.0

LAST_CHANCE_RETRY_SECONDS = 1.0
LAST_CHANCE_SHARE = 8
"""One slot in so many is for episodes that one more loss would make poison: whatever kills a worker takes few of them along.

One of them may be what killed the workers before, and the others only ran beside it.
"""

log = structlog.get_logger()


def _too_late(standing: Standing) -> str:
    """Why a request was not begun: whoever reads it has to know whether episodes are slow, or too many of them wait."""
    if standing.claims:
        return "its deadline passed while nobody played it"
    return (
        "its deadline passed before it was begun: more episodes are out than the environment workers begin within "
        "limits.episode; raise it, add slots or workers, or ask for fewer (learner.groups, learner.max_staleness)"
    )


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """What all attempts of one worker share. ``make`` makes the environment of an episode; ``nonce`` names one claim."""

    bus: Bus
    subjects: Subjects
    worker: str
    lane: str
    settings: EnvironmentSettings
    limits: LimitSettings
    make: Callable[[Task], Environment]
    nonce: Callable[[], str]


class Running:
    """One episode in one slot. ``give_back_seconds``: nak the request with that delay at the end (None: never)."""

    def __init__(self, request: EpisodeRequested, sequence: int, nonce: str) -> None:
        self.request = request
        self.sequence = sequence
        self.nonce = nonce
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.exchange: Exchange | None = None
        self.cancelled = False
        self.handed_back = False
        self.give_back_seconds: float | None = None


class Attempts:
    """The attempts of one worker, by episode."""

    def __init__(self, crew: Crew, leases: Leases, counters: defaultdict[str, float]) -> None:
        self._crew = crew
        self._bus = crew.bus
        self._subjects = crew.subjects
        self._leases = leases
        self._counters = counters
        self._running: dict[str, Running] = {}
        self._last_chances = 0
        self._closed = False
        self.routes = Routes(crew.bus, crew.subjects, self.nudge)

    @property
    def episodes(self) -> tuple[str, ...]:
        """Episodes in work."""
        return tuple(self._running)

    def deliver(self, sequence: int, action: Action) -> None:
        """Hand an Action to whoever waits for it; others have no use for it."""
        running = self._running.get(action.episode_id)
        if running is not None and running.exchange is not None:
            running.exchange.deliver(sequence, action)

    async def watch_late(self) -> None:
        """For ever: wake whoever has waited too long for an Action; one timer for all of them."""
        while True:
            await anyio.sleep(self._crew.limits.late / 2)
            now = anyio.current_time()
            for running in self._running.values():
                if running.exchange is not None:
                    running.exchange.nudge_if_late(now)

    def nudge(self, lane: str) -> None:
        """An inference worker drains: whoever waits on its lane looks at once."""
        for running in self._running.values():
            if running.exchange is not None and running.exchange.lane_in_use == lane:
                running.exchange.nudge()

    def cancel(self, episodes: Sequence[str]) -> list[str]:
        """End these episodes as ``cancelled``; returns those that run here."""
        found = [episode for episode in episodes if episode in self._running]
        for episode in found:
            self._running[episode].cancelled = True
            self._running[episode].scope.cancel()
        return found

    def hand_back_all(self) -> None:
        """Stop everything that still runs, with a goodbye, so that others go on at once; nothing is begun any more."""
        self._closed = True
        for running in tuple(self._running.values()):
            running.handed_back = True
            running.scope.cancel()

    async def take_up(self, delivery: Delivery) -> None:
        """Look before working: a result, a session of one's own, or else an attempt to be run here."""
        message = delivery.message
        try:
            request = decode(EpisodeRequested, message.payload, subject=message.subject)
        except MalformedMessage as malformed:
            self._counters["malformed"] += 1
            log.error("request ignored", reason=str(malformed))
            await delivery.ack()
            return
        if message.subject.rpartition(".")[2] != request.episode_id:
            self._counters["malformed"] += 1
            log.error("request ignored", reason="it names another episode than its subject", subject=message.subject)
            await delivery.ack()
            return
        standing = await read_standing(self._bus, self._subjects, request.episode_id)
        if standing.result is not None:
            await delivery.ack()
            return
        running = self._running.get(request.episode_id)
        if running is not None:
            if standing.held_by(running.nonce) or not standing.claims:
                self._leases.hold(request.episode_id, delivery)
                return
            running.scope.cancel()
            await running.ended.wait()
        if self._closed:
            await delivery.nak()
        elif request.episode_id not in self._running:
            await self._run_when_it_may(request, delivery, standing)

    async def _run_when_it_may(self, request: EpisodeRequested, delivery: Delivery, standing: Standing) -> None:
        """Run it, unless it has its last chance and others have theirs here at the moment."""
        settings = self._crew.settings
        if not standing.has_last_chance(settings.max_attempts):
            await self._run(request, delivery, standing)
        elif self._last_chances >= max(settings.slots // LAST_CHANCE_SHARE, 1):
            await delivery.nak(LAST_CHANCE_RETRY_SECONDS)
        else:
            self._last_chances += 1
            try:
                await self._run(request, delivery, standing)
            finally:
                self._last_chances -= 1

    async def _run(self, request: EpisodeRequested, delivery: Delivery, standing: Standing) -> None:
        episode = request.episode_id
        running = Running(request, delivery.message.sequence, self._crew.nonce())
        self._running[episode] = running
        self._leases.hold(episode, delivery)
        try:
            structlog.contextvars.bind_contextvars(episode=episode, attempt=standing.attempts + 1)
            with running.scope:
                await self._attempt(running, standing)
            if running.scope.cancelled_caught:
                await self._stopped(running)
        except Superseded as superseded:
            self._counters["superseded"] += 1
            log.info("attempt superseded", reason=str(superseded))
        finally:
            running.ended.set()
            del self._running[episode]
            held = self._leases.take(episode)
            if held is not None and running.give_back_seconds is not None:
                await held.nak(running.give_back_seconds)

    async def _attempt(self, running: Running, standing: Standing) -> None:
        request = running.request
        remaining_seconds = (request.deadline_ns - self._bus.now_ns()) / 1e9
        if standing.is_poison(self._crew.settings.max_attempts):
            await self._conclude(running, standing, "lost", "poison")
        elif remaining_seconds <= 0:
            await self._conclude(running, standing, "timeout", "episode_timeout", _too_late(standing))
        else:
            await self._claim_and_play(running, standing, remaining_seconds)

    async def _claim_and_play(self, running: Running, standing: Standing, remaining_seconds: float) -> None:
        request, crew = running.request, self._crew
        try:
            with Stages().within("make", crew.limits.open):
                environment = crew.make(request.task)
        except EpisodeEnded as ended:
            await self._conclude(running, standing, ended.outcome, ended.error_class, ended.error)
            return
        recorded = await read_turns(self._bus, self._subjects, request.episode_id, standing) if environment.replayable else ()
        claim = AttemptStarted(
            episode_id=request.episode_id,
            attempt=standing.attempts + 1,
            worker=crew.worker,
            nonce=running.nonce,
            lane=crew.lane,
            reason=standing.next_reason,
            resumed_at_turn=len(recorded),
            request_sequence=running.sequence,
        )
        claim_sequence = await self._claim(running, claim, standing)
        if claim_sequence is None:
            return
        running.exchange = await self._exchange(request, claim, recorded)
        session = Session(
            request=request,
            claim=claim,
            environment=environment,
            exchange=running.exchange,
            recorded=recorded,
            observed=await self._observed(request, recorded),
            remaining_seconds=remaining_seconds,
            settings=crew.settings,
            limits=crew.limits,
            counters=self._counters,
        )
        await self._finish(await session.play(), claim_sequence)

    async def _exchange(self, request: EpisodeRequested, claim: AttemptStarted, recorded: Sequence[Turn]) -> Exchange:
        """An earlier attempt may have used this very lane, so the last Action there is looked up."""
        subject = self._subjects.action(claim.lane, request.episode_id)
        last_action = await self._bus.last(subject) if claim.attempt > 1 else None
        return Exchange(
            self._bus,
            self._subjects,
            self.routes,
            request=request,
            claim=claim,
            history=tuple(recorded),
            action_sequence=last_action.sequence if last_action else 0,
            settings=self._crew.settings,
            limits=self._crew.limits,
        )

    async def _observed(self, request: EpisodeRequested, recorded: Sequence[Turn]) -> dict[int, tuple[ChatMessage, ...]]:
        if not recorded:
            return {}
        return await read_observed(self._bus, self._subjects, request.policy, request.episode_id, recorded)

    async def _claim(self, running: Running, claim: AttemptStarted, standing: Standing) -> int | None:
        """Store the claim; None when somebody else wrote first, or nobody knows and the request is given back."""
        subject = self._subjects.episode(claim.episode_id)
        try:
            return (await self._bus.publish(subject, encode(claim), expected_last=standing.last_sequence)).sequence
        except (SequenceConflict, PublishUnanswered, LogFull):
            self._counters["claims_refused"] += 1
            now = await read_standing(self._bus, self._subjects, claim.episode_id)
            if now.held_by(claim.nonce):
                return now.claim_sequence
            if now.result is not None:
                await self._ack(claim.episode_id)
            elif now.attempts == standing.attempts:  # otherwise a nak would take the request away from whoever claimed
                running.give_back_seconds = CLAIM_RETRY_SECONDS
            return None

    async def _conclude(
        self, running: Running, standing: Standing, outcome: Outcome, error_class: str, error: str = ""
    ) -> None:
        """A result without an attempt of one's own: it expects the last entry that was read."""
        result = result_without_attempt(
            running.request,
            running.sequence,
            standing,
            worker=self._crew.worker,
            outcome=outcome,
            error_class=error_class,
            error=error,
        )
        await self._finish(result, standing.last_sequence)

    async def _finish(self, result: EpisodeFinished, expected_last: int) -> None:
        """Store the result, then ack: in this order, so that a crash between them repeats nothing."""
        settled = await store_result(self._bus, self._subjects, result, expected_last=expected_last)
        if settled == "superseded":
            raise Superseded(f"attempt {result.attempt} of {result.episode_id} finished after it was replaced")
        if settled == "stored":
            self._count(result)
        await self._ack(result.episode_id)

    async def _ack(self, episode: str) -> None:
        delivery = self._leases.take(episode)
        if delivery is not None:
            await delivery.ack()

    async def _stopped(self, running: Running) -> None:
        """After a cancellation: the outcome ``cancelled`` if that was asked for, a goodbye if the worker drains."""
        if running.cancelled:
            standing = await self._standing_in_time(running.request)
            if standing.result is None:
                await self._conclude(running, standing, "cancelled", "cancelled")
            else:
                await self._ack(running.request.episode_id)
        elif running.handed_back:
            await self._say_goodbye(running)

    async def _standing_in_time(self, request: EpisodeRequested) -> Standing:
        """How the episode stands, however long the log is away: an order to cancel would be forgotten otherwise.

        Raises `RequestUnanswered` when this worker is leaving, or the deadline has passed and the requester closes it.
        """
        while True:
            try:
                return await read_standing(self._bus, self._subjects, request.episode_id)
            except RequestUnanswered as unanswered:
                if self._closed or self._bus.now_ns() >= request.deadline_ns:
                    raise
                log.warning("the log is asked again later", reason=str(unanswered))
                await anyio.sleep(RETRY_SECONDS)

    async def _say_goodbye(self, running: Running) -> None:
        episode = running.request.episode_id
        standing = await read_standing(self._bus, self._subjects, episode)
        newest = standing.newest
        if newest is None:
            running.give_back_seconds = 0.0
        if newest is None or not standing.held_by(running.nonce):
            return
        running.give_back_seconds = 0.0
        goodbye = AttemptReleased(episode_id=episode, attempt=newest.attempt, worker=self._crew.worker)
        await self._bus.publish(
            self._subjects.episode(episode), encode(goodbye), expected_last=standing.last_sequence, timeout=GOODBYE_SECONDS
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
