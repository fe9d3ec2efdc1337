"""One attempt at one episode: open, reset, turns, verify, close, under the episode's deadline, ending in one result.

The worker above made the claim and stores the result; the environment below knows nothing of the bus. `close` always runs, and
verify and close run before the result exists. What is not the policy's doing never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager

import msgspec
import structlog

from fleetbus.concurrency.deadlines import Deadline
from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus.core.algorithms.reward_components import find_reward_problem
from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.segments import SegmentError
from fleetbus.core.text.context import SUMMARY_KEPT, SUMMARY_REQUEST, format_status_line
from fleetbus_schemas import (
    GRADED,
    AttemptStarted,
    ChatMessage,
    ContextChange,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
    ToolSpec,
)
from fleetbus_schemas.seat import map_by_seat
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.environment.base import (
    Ahead,
    Environment,
    ReportsUntrained,
    ShowsWhole,
    Start,
    StartsInTurn,
    Step,
    Verdict,
)
from fleetbus_workers.environment.episode.ahead import AheadTurns, asks_ahead, goes_side_by_side
from fleetbus_workers.environment.episode.conclusion import (
    TIMED_OUT,
    Conclusion,
    apply_verdict,
    conclude_without_room,
    grade_timeout,
    note_unread,
)
from fleetbus_workers.environment.episode.first_failures import FirstFailures
from fleetbus_workers.environment.episode.policy_client import PolicyClient
from fleetbus_workers.environment.episode.result import build_result
from fleetbus_workers.environment.episode.seats import UNSEATED, EpisodeSeats, SeatError
from fleetbus_workers.environment.episode.segments import FIRST, EpisodeContext, Placement, append_line, find_context_tokens
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages, to_printable
from fleetbus_workers.environment.examples import insert_examples
from fleetbus_workers.environment.failure_location import locate_method
from fleetbus_workers.environment.normalization import clip_messages
from fleetbus_workers.environment.validation import validate_return

NO_STEP = Step()

log = structlog.get_logger()


class EpisodeRunner:
    """Plays one attempt. ``recorded`` turns of earlier attempts are re-applied; ``observed`` are the observations that
    they answered."""

    __slots__ = (
        "_asked",
        "_claim",
        "_clips",
        "_context",
        "_deadline",
        "_environment",
        "_examples",
        "_first_failures",
        "_has_tools",
        "_lack_of_room",
        "_last",
        "_limits",
        "_observed",
        "_policy_client",
        "_recorded",
        "_request",
        "_seats",
        "_settings",
        "_stages",
        "_tool_calls",
        "_tool_errors",
        "_turn_rewards",
        "_turns",
        "_unread",
    )

    def __init__(
        self,
        *,
        request: EpisodeRequested,
        claim: AttemptStarted,
        environment: Environment,
        policy_client: PolicyClient,
        recorded: tuple[Turn, ...],
        observed: Mapping[int, Observation],
        deadline: Deadline,
        settings: EnvironmentSettings,
        limits: LimitSettings,
        context_tokens: int = 0,
        examples: tuple[ChatMessage, ...] = (),
        counters: MutableMapping[str, float] | None = None,
        first_failures: FirstFailures | None = None,
    ) -> None:
        self._request = request
        self._claim = claim
        self._environment = environment
        self._clips = not (isinstance(environment, ShowsWhole) and environment.shows_whole)
        self._examples = examples
        self._policy_client = policy_client
        self._asked: PolicyClient | AheadTurns = policy_client
        """Who is asked for turns: one after another, or side by side where the environment tells them ahead."""
        self._recorded = recorded
        self._observed = observed
        self._deadline = deadline
        self._settings = settings
        self._limits = limits
        self._stages = Stages(counters, now=deadline.now)
        self._first_failures = first_failures or FirstFailures()
        self._turns: list[Turn] = []
        self._turn_rewards: list[float] = []
        self._tool_calls = 0
        self._tool_errors = 0
        self._has_tools = False
        self._context = EpisodeContext(settings, max_tokens=find_context_tokens(settings, request.max_tokens, context_tokens))
        self._unread: tuple[ChatMessage, ...] | None = None
        """What the policy shall see when it has written the summary that it was asked for; None if it was not asked."""
        self._lack_of_room = ""
        self._last = NO_STEP
        self._seats = UNSEATED

    @property
    def timings(self) -> dict[str, float]:
        return self._stages.timings

    @property
    def turn(self) -> int:
        """Turns that were played so far."""
        return len(self._turns)

    async def play(self) -> EpisodeFinished | None:
        """The attempt's result, None if its deadline was cancelled. Raises `Superseded`, or lets another cancellation through
        after closing the environment."""
        stages, conclusion = self._stages, TIMED_OUT
        try:
            try:
                with self._deadline as stages.deadline:
                    conclusion = await self._play_turns()
            except EpisodeEnded as ended:
                conclusion = self._describe_failure(ended)
            finally:
                stages.deadline = None
            if self._deadline.is_cancelled:
                return None
            if conclusion.outcome in GRADED:
                conclusion = await self._grade(conclusion)
        finally:
            await self._close()
        reward = self._request.timeout_reward if self._seats.pays_timeouts else None
        return self._build_result(grade_timeout(conclusion, reward, self.turn))

    def _describe_failure(self, ended: EpisodeEnded) -> Conclusion:
        return Conclusion(
            outcome=ended.outcome,
            error_class=ended.error_class,
            error=ended.error + self._seats.describe_asked(ended),
            location=ended.location,
            traceback=self._first_failures.describe(ended),
        )

    async def _play_turns(self) -> Conclusion:
        """From open to the last step. Each coroutine in which an episode waits holds half a KiB, so it waits for the policy
        here and no deeper."""
        messages, tools = await self._begin()
        placement = FIRST
        while self.turn < self._request.max_turns:
            turn = self._find_recorded(messages, placement)
            tokens_left = self._request.max_tokens - self._context.tokens + self._seats.other_tokens
            if turn is None and tokens_left > 0 and not self._seats.is_at_limit():
                with self._limit_answer():
                    turn = await self._asked.ask(
                        self.turn, messages, tools, tokens_left=tokens_left, placement=placement, seats=self._seats
                    )
                turn = self._check_answer(turn)
            if turn is None or self._is_beyond(turn, tokens_left):
                return conclude_without_room(self._turns, self._request, self._seats, tokens_left, self._lack_of_room)
            self._append_turn(turn, messages)
            if self._unread is not None:
                (messages, placement), tools = self._go_on_after_summary(self._unread), ()
                continue
            step = await self._step_environment(turn)
            if step.terminated:
                return Conclusion(outcome="completed")
            if step.truncated:
                return Conclusion(outcome="truncated", error_class="environment")
            messages, tools, placement = self._plan_turn(step)
        return Conclusion(outcome="truncated", error_class="turns")

    def _is_beyond(self, turn: Turn, tokens_left: int) -> bool:
        """True if a turn adds more than the episode may have, which one that was sent ahead is not told exactly."""
        if not isinstance(self._asked, AheadTurns) or self._seats.frozen is not None:
            return False
        return count_tokens(turn.action.prompt_delta) + count_tokens(turn.action.sampled) > tokens_left

    def _tell_ahead(self, told: Sequence[Ahead]) -> None:
        if self._asked is self._policy_client and goes_side_by_side(self._settings):
            clip = self._settings.observation_bytes if self._clips else 0
            most = self._settings.turns_at_once
            self._asked = AheadTurns(self._environment, self._policy_client, self._request, most=most, clip=clip)
        if isinstance(self._asked, AheadTurns):
            self._asked.tell(told, self.turn)

    async def _begin(self) -> tuple[tuple[ChatMessage, ...], tuple[ToolSpec, ...]]:
        """The messages that the policy sees first."""
        with self._stages.time_limit("open", self._limits.open):
            await self._environment.open(self._request.task)
        if isinstance(self._environment, StartsInTurn):
            await self._environment.wait_to_start()
        with self._stages.time_limit("reset", self._limits.reset):
            start = validate_return(Start, await self._environment.reset(), "reset", self._environment)
        if start.seat:
            others, limits = map_by_seat(self._request.seats), map_by_seat(self._request.seat_limits)
            self._seats = EpisodeSeats(start.seat, others, limits)
        self._has_tools = bool(start.tools or start.offered)
        messages = start.messages
        if self._clips:  # tools are described whole
            messages = clip_messages(messages, self._settings.observation_bytes, whole=start.prompted)
        if start.ahead or asks_ahead(self._environment):
            self._tell_ahead(start.ahead)
        return insert_examples(messages, () if self._seats.frozen else self._examples), start.tools

    def _append_status(self, messages: tuple[ChatMessage, ...], placement: Placement) -> tuple[ChatMessage, ...]:
        """The policy's budget at the end of what it sees next, if that is wanted."""
        if not self._settings.context_status or not messages or self._seats.frozen:
            return messages
        context, (turn, max_turns) = self._context, self._seats.count_turns(self.turn, self._request.max_turns)
        tokens, max_tokens = context.count_held(placement), context.max_tokens
        return append_line(messages, format_status_line(tokens=tokens, max_tokens=max_tokens, turn=turn, max_turns=max_turns))

    def _plan_turn(self, step: Step) -> tuple[tuple[ChatMessage, ...], tuple[ToolSpec, ...], Placement]:
        """The messages that the policy sees next, and their segment."""
        messages, context = step.messages, self._context
        if step.ahead:
            self._tell_ahead(step.ahead)
        if step.seat or step.context is not None:
            try:
                change = self._seats.take(step) or step.context
            except SeatError as odd:
                raise EpisodeEnded("env_failed", "seat", str(odd), location=locate_method(self._environment, "step")) from odd
            if change is not None:
                placement = self._change_context(change)
                if change is step.context or change.resume is None:
                    return self._append_status(messages, placement), change.tools, placement
        if self._seats.frozen or not context.needs_compaction(messages):
            placement = context.extend()
        elif self._settings.compaction == "summarise":
            self._unread = messages
            return append_line(messages, SUMMARY_REQUEST), (), context.extend()
        else:
            placement = context.compact(messages) or context.extend()
        return self._append_status(messages, placement), (), placement

    def _change_context(self, wanted: ContextChange) -> Placement:
        try:
            return self._context.change(wanted)
        except SegmentError as error:
            location = locate_method(self._environment, "step")
            raise EpisodeEnded("env_failed", "context_change", str(error), location=location) from error

    def _go_on_after_summary(self, unread: tuple[ChatMessage, ...]) -> tuple[tuple[ChatMessage, ...], Placement]:
        """The summary is no step of the environment: what it showed before is shown again, after what is left."""
        self._unread = None
        self._turn_rewards.append(0.0)
        placement = self._context.keep_summary()
        return self._append_status(append_line(unread, SUMMARY_KEPT), placement), placement

    def _find_recorded(self, messages: tuple[ChatMessage, ...], placement: Placement) -> Turn | None:
        """The next turn as an earlier attempt played it. It has to be asked for as then: with the same messages, in the same
        segment."""
        if self.turn >= len(self._recorded):
            return None
        before = self._observed.get(self.turn)
        shown = (messages, placement, self._seats.current)
        if before is not None and (before.messages, Placement.of(before), before.seat) != shown:
            raise EpisodeEnded("lost", "diverged", f"turn {self.turn} shows something else than was recorded")
        return self._recorded[self.turn]

    def _limit_answer(self) -> AbstractContextManager[None, None]:
        """The limit of waiting for the policy, or the environment's patience, whichever ends first."""
        idle_seconds = self._limits.idle - (self._stages.now() - self._stages.ended_at)
        limit, seconds = min(("action", self._limits.action), ("idle", idle_seconds), key=lambda named: named[1])
        return self._stages.time_limit("action", seconds, limit=limit)

    def _check_answer(self, turn: Turn) -> Turn | None:
        """The policy's answer; None if there was no room for any."""
        action = turn.action
        if action.finish_reason == "failed":
            raise EpisodeEnded("lost", action.error_class or "action_failed", action.error)
        if not action.sampled:
            is_by_limit = not action.prompt_delta and not action.error_class and self._seats.describe_limit(1)[0]
            if self._seats.frozen and not is_by_limit:
                raise EpisodeEnded("lost", "seat_without_room", action.error)
            self._lack_of_room = action.error
            return None
        return turn

    def _append_turn(self, turn: Turn, messages: tuple[ChatMessage, ...]) -> None:
        added = count_tokens(turn.action.prompt_delta + turn.action.sampled) if self._seats.current else 0
        self._seats.append(len(self._turns), turn.action.segment, added)
        self._turns.append(turn)
        try:
            self._context.append(turn, messages)
        except SegmentError as error:
            raise EpisodeEnded("lost", "segments_broken", str(error)) from error

    async def _step_environment(self, turn: Turn) -> Step:
        with self._stages.limit_step(self._environment, self._limits):
            step = validate_return(Step, await self._environment.step(turn.action), "step", self._environment)
            if self._clips:
                step = msgspec.structs.replace(step, messages=clip_messages(step.messages, self._settings.observation_bytes))
            self._last = step
        self._tool_calls += step.tool_calls
        self._tool_errors += step.tool_errors
        problem = find_reward_problem([step.reward], self._settings.max_abs_reward)
        self._turn_rewards.append(0.0 if problem else step.reward)
        if problem:
            raise EpisodeEnded(
                "verifier_unknown",
                problem,
                f"turn {self.turn - 1} was rewarded {step.reward:g}",
                location=locate_method(self._environment, "step"),
            )
        return step

    async def _grade(self, conclusion: Conclusion) -> Conclusion:
        """The verdict, even when the worker is being cancelled; without one the outcome is ``verifier_unknown``."""
        environment = self._environment
        if self._has_tools and not (self._tool_calls or self._tool_errors) and self._seats is UNSEATED:
            conclusion = note_unread(conclusion, self._turns)
        try:
            with self._stages.time_limit("verify", self._limits.verify, shield=True):
                verdict = validate_return(Verdict, await environment.verify(), "verify", environment)
        except EpisodeEnded as ended:
            return Conclusion(
                outcome="verifier_unknown",
                error_class="no_verdict",
                error=to_printable(f"{ended.error_class}: {ended.error}"),
                location=ended.location,
                traceback=self._first_failures.describe(ended),
            )
        return apply_verdict(
            conclusion,
            verdict,
            seats=self._seats,
            location=locate_method(environment, "verify"),
            max_abs_reward=self._settings.max_abs_reward,
        )

    async def _close(self) -> None:
        """Close the environment in every case; a close that hangs or raises changes no outcome."""
        try:
            with self._stages.time_limit("close", self._limits.close, shield=True):
                await self._environment.close()
        except EpisodeEnded as ended:
            log.warning("environment close failed; continuing", reason=ended.error)

    def _build_result(self, conclusion: Conclusion) -> EpisodeFinished:
        return build_result(
            self._request,
            self._claim,
            conclusion,
            turns=self._turns,
            turn_rewards=self._turn_rewards,
            timings=self._stages.timings,
            tools=(self._tool_calls, self._tool_errors),
            last=self._last,
            seats=self._seats,
            segments=self._context.segments,
            untrained=self._environment.list_untrained() if isinstance(self._environment, ReportsUntrained) else (),
        )
