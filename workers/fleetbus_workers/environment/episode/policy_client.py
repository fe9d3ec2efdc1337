"""One episode's exchange with the policy: an Observation out, its Action back, one turn after another.

Turns that do not stand on the one that is waited for may be sent ahead; their Actions come after its own, and wait here. One
that does not come is asked for again when its turn has come, as any other.
Sticky: after its first Action an episode's observations go to that inference worker's lane. When an Action is late the log is
read first - result, newest claim, the Action itself - and only then is the observation sent again, to any worker (hop + 1).
What was sent to any worker waits its turn there, and is sent again when the log has lost it or its consumer calls it acked.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Collection, Mapping

import msgspec
import structlog

from fleetbus.bus.streams import observations_consumer
from fleetbus.concurrency.wakeup import Wakeup
from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.late_action import AskedTurn, LateDecision, LateFacts, decide_late_action
from fleetbus.core.episode.result_checks import MAX_INT32
from fleetbus.errors import BusClosed, BusError
from fleetbus.log.episodes import decode_entries, read_episode_state, store_message
from fleetbus_schemas import ANY_LANE, Action, AttemptStarted, ChatMessage, EpisodeRequested, Observation, ToolSpec
from fleetbus_schemas.tokens import EMPTY_HISTORY
from fleetbus_workers.environment.base import Ahead, LimitsTurns
from fleetbus_workers.environment.episode.lane_status import LaneStatus
from fleetbus_workers.environment.episode.seats import UNSEATED, EpisodeSeats
from fleetbus_workers.environment.episode.segments import FIRST, Placement
from fleetbus_workers.environment.episode.sent_ahead import SentAhead, SentTurn, place_ahead
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Superseded
from fleetbus_workers.environment.worker_context import WorkerContext

MAX_CHECK_INTERVAL_SECONDS = 10.0
"""Checks of a late Action are at most this far apart."""

MOST_DOUBLINGS = 20
"""Of the pause between checks: an episode may wait for hours, and its pause stays a number."""

CHECKS_OF_QUEUE = 4
"""Before this many checks it is not checked whether an observation for any worker still waits: it costs the server two
answers."""

log = structlog.get_logger()


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Facts read for some attempts: the sequence of the last entry by subject, up to where the queue of a policy is acked
    (0: not known), and the turns (``episode.attempt.turn``) in work by inference worker (None: not known)."""

    last: Mapping[str, int]
    acked: Mapping[str, int]
    in_work: Mapping[str, Collection[str] | None]


class PolicyClient:
    """Asks for Actions on behalf of one attempt. `deliver` and `recheck` are called by the worker's receivers."""

    __slots__ = (
        "_action_sequence",
        "_answer",
        "_check_at",
        "_checks",
        "_claim",
        "_claim_sequence",
        "_context",
        "_elsewhere",
        "_expected",
        "_history_hashes",
        "_lane",
        "_lane_status",
        "_late_turns",
        "_observation_sequence",
        "_request",
        "_sent",
        "_wakeup",
        "_worker",
        "lane_in_use",
        "limited_by",
        "policy",
    )

    def __init__(
        self,
        context: WorkerContext,
        lane_status: LaneStatus,
        *,
        request: EpisodeRequested,
        claim: AttemptStarted,
        claim_sequence: int,
        history: tuple[Turn, ...],
        action_sequence: int,
    ) -> None:
        self._context, self._lane_status = context, lane_status
        self._request = request
        self._claim, self._claim_sequence = claim, claim_sequence
        self._action_sequence = action_sequence
        self._history_hashes = {turn.action.segment: turn.action.history_hash for turn in history}
        self.policy = request.policy
        """Who is asked for the turn."""
        self._lane, self._worker = ANY_LANE, ""
        if history and not request.seats:
            self._stick_to(history[-1].action)
        self._elsewhere: dict[str, tuple[str, str]] | None = None
        """Lane and worker of the last answers of the other policies, where an episode has several."""
        self._expected = -1
        self._answer: Turn | None = None
        self._wakeup = Wakeup()
        self._check_at, self._checks = math.inf, 0
        self._observation_sequence = 0
        self._sent: SentAhead | None = None
        """None as long as no turn was sent ahead."""
        self._late_turns = context.settings.turns_at_once * (claim.attempt - 1)
        """So many turns that earlier attempts sent ahead may yet be answered, each before the awaited one."""
        self.lane_in_use = ANY_LANE
        self.limited_by: LimitsTurns | None = None

    def deliver(self, sequence: int, action: Action) -> None:
        """An Action of this episode was read; anything but the awaited one is a repetition or from another attempt."""
        if action.attempt != self._claim.attempt:
            return
        if action.turn == self._expected and self._answer is None:
            self._answer = Turn(sequence=sequence, lane=self._claim.lane, action=action)
            self._wakeup.set()
        elif self._sent is not None:
            self._sent.deliver(Turn(sequence=sequence, lane=self._claim.lane, action=action))

    def recheck(self) -> None:
        """Look at once whether the awaited Action is still to be expected from where it was asked for."""
        self._wakeup.set()

    def is_late(self, now: float) -> bool:
        """The worker's one timer asks this, so that no turn needs a timer of its own."""
        return now >= self._check_at

    @property
    def asked_worker(self) -> str:
        """The inference worker whose lane was asked; empty if it was any."""
        return self._worker if self.lane_in_use != ANY_LANE else ""

    @property
    def looks_into_queue(self) -> bool:
        """True if it is checked that an observation for any worker still waits."""
        return self.lane_in_use == ANY_LANE and self._checks >= CHECKS_OF_QUEUE

    @property
    def watched_subjects(self) -> list[str]:
        """Those whose last entries say whether this turn's own check of the log would find anything."""
        subjects, episode_id = self._context.subjects, self._request.episode_id
        watched = [subjects.episode(episode_id), subjects.action(self._claim.lane, episode_id)]
        if self.looks_into_queue:
            watched.append(subjects.observation(self.policy, ANY_LANE, episode_id))
        return watched

    def apply(self, standing: Standing) -> None:
        """Apply what was read for many attempts: this one waits on, or wakes to check for itself."""
        if decide_late_action(self._asked, self._select_facts(standing)) == "wait":
            self._plan_check()
        else:
            self._check_at = math.inf
            self._wakeup.set()

    @property
    def _asked(self) -> AskedTurn:
        return AskedTurn(
            observation_sequence=self._observation_sequence, action_sequence=self._action_sequence, check=self._checks
        )

    def _select_facts(self, standing: Standing) -> LateFacts:
        """Select from what was read for many attempts what concerns this one: anything new stands behind what is known."""
        episode, action, *queued = (standing.last.get(subject, 0) for subject in self.watched_subjects)
        in_work = standing.in_work.get(self._worker)
        is_sticky = self.lane_in_use != ANY_LANE
        return LateFacts(
            is_superseded=episode != self._claim_sequence,
            action_sequence=action,
            is_lane_usable=not is_sticky or (self._lane_status.is_usable(self.lane_in_use) and in_work is not None),
            is_in_work=not is_sticky or self._turn_name in (in_work or ()),
            queued_sequence=queued[0] if queued else None,
            acked_sequence=standing.acked.get(self.policy, 0),
        )

    def ask(
        self,
        turn: int,
        messages: tuple[ChatMessage, ...],
        tools: tuple[ToolSpec, ...],
        *,
        tokens_left: int,
        placement: Placement = FIRST,
        seats: EpisodeSeats = UNSEATED,
    ) -> Awaitable[Turn]:
        """Publish the observation of ``turn`` and wait for its Action. The caller's scope limits the wait. ``seats`` say
        whose turn it is, and who plays it.

        Raises `Superseded`, or `EpisodeEnded` when the observation went round too often.
        """
        self._expected = turn
        observation = self._build(turn, messages, tools, tokens_left, placement, seats)
        sent, self._answer = self._sent.take(observation) if self._sent is not None else (None, None)
        if sent is None or (not sent.sequence and self._answer is None):
            return self._await_answer(observation, self._choose_lane())
        if sent.lane != ANY_LANE:
            self._lane, self._worker = sent.lane, sent.worker
        return self._await_answer(observation, sent.lane, sent.sequence)

    async def send(
        self,
        turn: int,
        messages: tuple[ChatMessage, ...],
        tools: tuple[ToolSpec, ...],
        *,
        tokens_left: int,
        placement: Placement,
        seats: EpisodeSeats,
        ahead: Ahead | None = None,
    ) -> None:
        """Publish the observation of ``turn`` before it is asked for. One that was told ``ahead`` follows the turn that is
        waited for, and has a seat and limits of its own."""
        observation = self._build(turn, messages, tools, tokens_left, placement, seats)
        if ahead is not None:
            sampling = ahead.limits.apply(self._request.sampling)
            observation = place_ahead(observation, ahead.seat, sampling, tokens_left, ahead=turn - self._expected)
        self._sent = self._sent or SentAhead()
        sent = SentTurn(observation, self._choose_lane(), self._worker)
        self._sent.note(sent)
        subject = self._context.subjects.observation(observation.policy, sent.lane, observation.episode_id)
        sequence = await store_message(self._context.bus, subject, observation)
        if turn in self._sent:
            self._sent.note(sent._replace(sequence=sequence))

    def has_sent(self, turn: int) -> bool:
        """True if that turn was sent, and not asked for yet."""
        return self._sent is not None and turn in self._sent

    def takes_ahead(self) -> bool:
        """True if whoever is asked next, for the episode's own policy, answers turns that are sent ahead."""
        if self.policy != self._request.policy:
            self._turn_to(self._request.policy)
        return self._lane_status.takes_ahead(self._choose_lane(), self.policy)

    def _choose_lane(self) -> str:
        is_free = self._lane_status.is_usable(self._lane) and not self._lane_status.is_full(self._lane)
        return self._lane if is_free else ANY_LANE

    def _build(
        self,
        turn: int,
        messages: tuple[ChatMessage, ...],
        tools: tuple[ToolSpec, ...],
        tokens_left: int,
        placement: Placement,
        seats: EpisodeSeats,
    ) -> Observation:
        request, other, frozen = self._request, seats.other, seats.frozen
        policy = request.policy if other is None else other.policy
        if policy != self.policy:
            self._turn_to(policy)
        sampling = request.sampling
        if other is not None:
            sampling = msgspec.structs.replace(other.sampling, seed=request.sampling.seed)
        if self.limited_by and frozen is None:
            sampling = self.limited_by.turn_limits.apply(sampling)
        stands_on = placement.segment if placement.origin is None else placement.origin.parent
        return Observation(
            episode_id=request.episode_id,
            attempt=self._claim.attempt,
            turn=turn,
            policy=policy,
            messages=messages,
            tools=tools,
            sampling=sampling,
            tokens_left=seats.limit_tokens(tokens_left if frozen is None else MAX_INT32),
            pinned_version=request.pinned_version if other is None else other.version,
            history_hash=self._history_hashes.get(stands_on, EMPTY_HISTORY),
            environment_lane=self._claim.lane,
            action_sequence=self._action_sequence,
            request_sequence=self._claim.request_sequence,
            deadline_ns=request.deadline_ns,
            segment=placement.segment,
            origin=placement.origin,
            segments=placement.segments,
            seat=seats.current,
            trained=frozen is None,
        )

    def _turn_to(self, policy: str) -> None:
        """Each policy is answered from lanes of its own."""
        self._elsewhere = self._elsewhere or {}
        self._elsewhere[self.policy] = self._lane, self._worker
        self._lane, self._worker = self._elsewhere.get(policy, (ANY_LANE, ""))
        self.policy = policy

    async def _await_answer(self, observation: Observation, lane: str, sequence: int = 0) -> Turn:
        """``sequence``: where it stands, if it is known to have been stored before."""
        if sequence or self._answer is not None:
            self.lane_in_use, self._observation_sequence = lane, sequence
            self._wakeup.is_set = self._answer is not None
        else:
            await self._send(observation, lane)
        self._checks = 0
        while True:
            self._plan_check()
            await self._wakeup.wait()
            if self._answer is not None:
                return self._take_answer(self._answer)
            self._wakeup.clear()
            try:
                decision = await self._check_log()
            except BusClosed:
                raise
            except BusError as error:  # also that the policy, which the request names, has no consumer
                log.warning("log read failed; retrying", turn=observation.turn, reason=str(error))
                continue
            if decision == "superseded":
                raise Superseded(f"attempt {self._claim.attempt} of {observation.episode_id} no longer holds the episode")
            if decision == "resend" and self._answer is None:  # it may have been delivered meanwhile
                observation = self._reroute(observation)
                await self._send(observation, ANY_LANE)

    def _plan_check(self) -> None:
        pause = min(self._context.limits.late * 2 ** min(self._checks, MOST_DOUBLINGS), MAX_CHECK_INTERVAL_SECONDS)
        self._check_at = self._context.now() + pause
        self._checks += 1

    async def _send(self, observation: Observation, lane: str) -> None:
        self.lane_in_use = lane
        if self._answer is None:
            self._wakeup.clear()
        subject = self._context.subjects.observation(observation.policy, lane, observation.episode_id)
        self._observation_sequence = await store_message(self._context.bus, subject, observation)

    def _reroute(self, observation: Observation) -> Observation:
        hop = observation.hop + 1
        if self._late_turns > 0 and self._action_sequence != observation.action_sequence:
            self._late_turns, hop = self._late_turns - 1, observation.hop
        if hop > self._context.settings.max_hops:
            raise EpisodeEnded("lost", "poison_observation", f"turn {observation.turn} went unanswered {hop} times")
        log.info("answer is late; rerouting the observation", turn=observation.turn, hop=hop, lane=self.lane_in_use)
        return msgspec.structs.replace(observation, hop=hop, action_sequence=self._action_sequence)

    async def _check_log(self) -> LateDecision:
        """Read first who holds the episode and whether the Action was missed, then where the Observation is."""
        facts = await self._read_entries()
        decision = decide_late_action(self._asked, facts)
        if decision == "wait" and self._answer is None:
            decision = decide_late_action(self._asked, await self._add_whereabouts(facts))
        if decision == "resend":
            self._action_sequence = facts.action_sequence
        return decision

    async def _read_entries(self) -> LateFacts:
        bus, subjects, episode_id = self._context.bus, self._context.subjects, self._request.episode_id
        episode_state = await read_episode_state(bus, subjects, episode_id)
        subject = subjects.action(self._claim.lane, episode_id)
        if self._sent is None:
            stored = await bus.last(subject)
            entries = [stored] if stored is not None else []
        else:  # there may be answers to later turns behind the one that is missed
            entries = await bus.history([subject])
        for entry, action in decode_entries(Action, entries):
            self.deliver(entry.sequence, action)
        return LateFacts(
            is_superseded=episode_state.ends(self._claim),
            is_answered=self._answer is not None,
            action_sequence=entries[-1].sequence if entries else self._action_sequence,
        )

    async def _add_whereabouts(self, facts: LateFacts) -> LateFacts:
        if self.lane_in_use != ANY_LANE:
            is_usable = self._lane_status.is_usable(self.lane_in_use)
            in_work = await self._lane_status.ask_turns(self._worker) if is_usable else None
            return msgspec.structs.replace(
                facts, is_lane_usable=in_work is not None, is_in_work=self._turn_name in (in_work or ())
            )
        if not self.looks_into_queue:
            return facts
        subject = self._context.subjects.observation(self.policy, ANY_LANE, self._request.episode_id)
        stored = await self._context.bus.last(subject)
        (floor,) = await self._context.bus.ack_floors([observations_consumer(self.policy, ANY_LANE)])
        return msgspec.structs.replace(
            facts, queued_sequence=stored.sequence if stored is not None else 0, acked_sequence=floor.ack_floor
        )

    @property
    def _turn_name(self) -> str:
        return f"{self._request.episode_id}.{self._claim.attempt}.{self._expected}"

    def _take_answer(self, answer: Turn) -> Turn:
        action = answer.action
        self._check_at, self._action_sequence = math.inf, answer.sequence
        self._history_hashes[action.segment] = action.history_hash
        self._stick_to(action)
        return answer

    def _stick_to(self, action: Action) -> None:
        """Go on with the worker that sampled an Action, if the Action says who that was."""
        if action.lane and action.worker:
            self._lane, self._worker = action.lane, action.worker
