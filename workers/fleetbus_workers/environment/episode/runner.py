"""One attempt at one episode: open, reset, turns, verify, close, under the episode's deadline, ending in one result.

The worker above made the claim and stores the result; the environment below knows nothing of the bus. `close` always runs, and
verify and close run before the result exists. Whatever is not the policy's doing never becomes a reward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, MutableMapping

import anyio
import msgspec
import structlog

from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus.core.context import format_status_line
from fleetbus.core.history import Turn, loss_mask
from fleetbus.core.reward_bounds import find_reward_problem
from fleetbus.core.success import success_in
from fleetbus_schemas import GRADED, AttemptStarted, ChatMessage, EpisodeFinished, EpisodeRequested, Outcome, Text, ToolSpec
from fleetbus_schemas.tokens import count_tokens, pack_mask
from fleetbus_workers.environment.base import Environment, Step
from fleetbus_workers.environment.episode.normalization import (
    INFO_BYTES,
    check_messages,
    clip_messages,
    clipped_text,
    clipped_values,
    shown_text,
    to_plain_number,
)
from fleetbus_workers.environment.episode.policy_client import PolicyClient
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages, to_printable

LAST_OBSERVATION_BYTES = 2048

log = structlog.get_logger()


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, before or after its verdict."""

    outcome: Outcome
    error_class: str = ""
    error: str = ""
    reward: float | None = None


class EpisodeRunner:
    """Plays one attempt. ``recorded`` turns of earlier attempts are re-applied; ``observed`` is what was seen then."""

    def __init__(
        self,
        *,
        request: EpisodeRequested,
        claim: AttemptStarted,
        environment: Environment,
        policy_client: PolicyClient,
        recorded: tuple[Turn, ...],
        observed: Mapping[int, tuple[ChatMessage, ...]],
        remaining_seconds: float,
        settings: EnvironmentSettings,
        limits: LimitSettings,
        counters: MutableMapping[str, float] | None = None,
    ) -> None:
        self._request = request
        self._claim = claim
        self._environment = environment
        self._policy_client = policy_client
        self._recorded = recorded
        self._observed = observed
        self._remaining_seconds = remaining_seconds
        self._settings = settings
        self._limits = limits
        self._stages = Stages(counters)
        self._turns: list[Turn] = []
        self._turn_rewards: list[float] = []
        self._tool_calls = 0
        self._tool_errors = 0
        self._tokens = 0
        self._last = Step()

    @property
    def timings(self) -> dict[str, float]:
        return self._stages.timings

    @property
    def turn(self) -> int:
        """Turns that were played so far."""
        return len(self._turns)

    async def play(self) -> EpisodeFinished:
        """The attempt's result. Raises `Superseded`, or lets cancellation through after closing the environment."""
        try:
            conclusion = await self._run_to_end()
            if conclusion.outcome in GRADED:
                conclusion = await self._grade(conclusion)
        finally:
            await self._close()
        return self._build_result(conclusion)

    async def _run_to_end(self) -> Conclusion:
        """Open to last step within the episode's deadline; failures become conclusions here."""
        try:
            with anyio.move_on_after(self._remaining_seconds):
                return await self._run_turns()
        except EpisodeEnded as ended:
            return Conclusion(outcome=ended.outcome, error_class=ended.error_class, error=ended.error)
        return Conclusion(outcome="timeout", error_class="episode_timeout", error="the episode's deadline passed")

    async def _run_turns(self) -> Conclusion:
        with self._stages.time_limit("open", self._limits.open):
            await self._environment.open(self._request.task)
        with self._stages.time_limit("reset", self._limits.reset):
            start = await self._environment.reset()
            messages, tools = check_messages(start.messages), tuple(start.tools)
        while self.turn < self._request.max_turns:
            turn = await self._obtain_turn(messages, tools)
            if turn is None:
                return Conclusion(outcome="truncated", error_class="tokens", error="" if self.turn else self._no_room())
            step = await self._step_environment(turn)
            if step.terminated:
                return Conclusion(outcome="completed")
            if step.truncated:
                return Conclusion(outcome="truncated", error_class="environment")
            messages, tools = self._append_status(step.messages), ()
        return Conclusion(outcome="truncated", error_class="turns")

    def _no_room(self) -> str:
        return (
            "the prompt leaves no room for a turn: it uses up the "
            f"{self._request.max_tokens} tokens of the episode, or those that the model takes; shorten it, or raise the limit"
        )

    def _append_status(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """The policy's budget at the end of what it sees next, if that is wanted."""
        if not self._settings.context_status or not messages:
            return messages
        request = self._request
        line = format_status_line(
            tokens=self._tokens, max_tokens=request.max_tokens, turn=self.turn, max_turns=request.max_turns
        )
        last = messages[-1]
        content = f"{last.content}\n{line}" if isinstance(last.content, str) else (*last.content, Text(text=line))
        return (*messages[:-1], msgspec.structs.replace(last, content=content))

    async def _obtain_turn(self, messages: tuple[ChatMessage, ...], tools: tuple[ToolSpec, ...]) -> Turn | None:
        """The recorded turn if there is one, else the policy's answer; None when its tokens are used up."""
        if self.turn < len(self._recorded):
            self._check_divergence(messages)
            return self._recorded[self.turn]
        tokens_left = self._request.max_tokens - self._tokens
        if tokens_left <= 0:
            return None
        turn = await self._ask_policy(messages, tools, tokens_left)
        if turn.action.finish_reason == "failed":
            raise EpisodeEnded("lost", turn.action.error_class or "action_failed", turn.action.error)
        return turn if turn.action.sampled else None

    async def _ask_policy(self, messages: tuple[ChatMessage, ...], tools: tuple[ToolSpec, ...], tokens_left: int) -> Turn:
        """The policy's answer, within the limit of waiting for it and the environment's patience, whichever ends first."""
        idle_seconds = self._limits.idle - (anyio.current_time() - self._stages.ended_at)
        limit, seconds = min(("action", self._limits.action), ("idle", idle_seconds), key=lambda named: named[1])
        with self._stages.time_limit("action", seconds, limit=limit):
            return await self._policy_client.ask(self.turn, messages, tools, tokens_left=tokens_left)

    def _check_divergence(self, messages: tuple[ChatMessage, ...]) -> None:
        """A re-applied turn has to start from what was observed when it was first played."""
        before = self._observed.get(self.turn)
        if before is not None and before != messages:
            raise EpisodeEnded("lost", "diverged", f"turn {self.turn} shows something else than was recorded")

    async def _step_environment(self, turn: Turn) -> Step:
        self._turns.append(turn)
        self._tokens += count_tokens(turn.action.prompt_delta) + count_tokens(turn.action.sampled)
        with self._stages.time_limit("step", self._limits.step):
            step = await self._environment.step(turn.action)
            step = msgspec.structs.replace(
                step, messages=clip_messages(check_messages(step.messages), self._settings.observation_bytes)
            )
            self._count(step)
            self._last = step
        if problem := find_reward_problem(self._turn_rewards[-1:], self._settings.max_abs_reward):
            raise EpisodeEnded("verifier_unknown", problem, f"turn {self.turn - 1} was rewarded {self._turn_rewards[-1]:g}")
        return step

    def _count(self, step: Step) -> None:
        """Numbers of other libraries become plain ones; what is no number raises `TypeError`."""
        self._tool_calls += operator.index(step.tool_calls)
        self._tool_errors += operator.index(step.tool_errors)
        self._turn_rewards.append(to_plain_number(step.reward))

    async def _grade(self, conclusion: Conclusion) -> Conclusion:
        """The verdict, even when the worker is being cancelled; without one the outcome is ``verifier_unknown``."""
        try:
            with self._stages.time_limit("verify", self._limits.verify, shield=True):
                verdict = await self._environment.verify()
                reward = math.nan if verdict.reward is None else to_plain_number(verdict.reward)
                reason = to_printable(verdict.reason)
        except EpisodeEnded as ended:
            reward, reason = math.nan, to_printable(f"{ended.error_class}: {ended.error}")
        if not math.isfinite(reward):
            if conclusion.error:  # nothing was played: that is why there is nothing to grade
                return Conclusion(outcome="verifier_unknown", error_class="prompt_too_long", error=conclusion.error)
            return Conclusion(outcome="verifier_unknown", error_class="no_verdict", error=reason)
        if problem := find_reward_problem([reward], self._settings.max_abs_reward):
            return Conclusion(outcome="verifier_unknown", error_class=problem, error=f"the verdict is {reward:g}")
        return msgspec.structs.replace(conclusion, reward=reward)

    async def _close(self) -> None:
        """Close the environment whatever happened; a close that hangs or raises changes no outcome."""
        try:
            with self._stages.time_limit("close", self._limits.close, shield=True):
                await self._environment.close()
        except EpisodeEnded as ended:
            log.warning("environment close failed; continuing", reason=ended.error)

    def _build_result(self, conclusion: Conclusion) -> EpisodeFinished:
        request = self._request
        mask = loss_mask(self._turns)
        info = clipped_values(self._last.info, INFO_BYTES)
        limit = self._settings.max_abs_reward
        versions = {span.version for turn in self._turns for span in turn.action.versions}
        return EpisodeFinished(
            episode_id=request.episode_id,
            group_id=request.group_id,
            attempt=self._claim.attempt,
            outcome=conclusion.outcome,
            worker=self._claim.worker,
            split=request.split,
            task_key=request.task.key,
            dataset_version=request.task.dataset_version,
            env=request.task.env,
            request_sequence=self._claim.request_sequence,
            error_class=conclusion.error_class,
            error=conclusion.error,
            reward=conclusion.reward,
            turn_rewards=tuple(0.0 if find_reward_problem([reward], limit) else reward for reward in self._turn_rewards),
            turns=len(self._turns),
            actions=tuple(turn.reference for turn in self._turns),
            tokens=len(mask),
            loss_mask=pack_mask(mask),
            timings={stage: round(seconds, 6) for stage, seconds in self._stages.timings.items()},
            tool_calls=self._tool_calls,
            tool_errors=self._tool_errors,
            attempts=self._claim.attempt,
            policy_versions=tuple(sorted(versions)),
            success=success_in(info),
            info=info,
            last_observation=to_printable(clipped_text(shown_text(self._last.messages), LAST_OBSERVATION_BYTES)),
        )
