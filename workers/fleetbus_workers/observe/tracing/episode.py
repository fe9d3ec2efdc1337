"""One episode as spans: a fold of its entries in the order of the log. Pure.

    episode                      request to result
    ├─ queue                     until an environment worker claims it, the first time or after a hand-back
    ├─ lost                      from the last sign of an attempt to the claim that takes it over
    └─ attempt                   claim to result, to the release, or to its last sign
       ├─ open                   to the first observation
       ├─ turn                   observation to the next one
       │  ├─ queue               at the engine
       │  ├─ generate
       │  └─ tool | step         the environment's part: with tool calls, or without
       └─ verify, close

A repeated message makes no second span: an observation that is sent again, a late action, an entry read twice.
Boundaries are the times at which the server stored the entries, so clocks of workers play no part; how long an observation
waited and was generated for is what the inference worker measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.trace_ids import ROOT, build_turn_path, span_id, trace_id
from fleetbus_schemas import (
    GRADED,
    Action,
    AttemptReleased,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
)
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.observe.tracing import gen_ai
from fleetbus_workers.observe.tracing.gen_ai import PromptLengths
from fleetbus_workers.observe.tracing.span import Span, Trace, Value, to_nanoseconds


class EpisodeTrace(Trace):
    """One episode that has no result yet, and then where it ended. Spans have what was said only with ``content``."""

    def __init__(self, run: str, entry: StreamEntry, request: EpisodeRequested, *, content: bool = False) -> None:
        common: dict[str, Value] = {"fleetbus.run": run, "fleetbus.episode": request.episode_id}
        super().__init__(trace_id(run, request.episode_id, request.deadline_ns), entry.sequence, common)
        self.root_id = span_id(self.trace_id)
        self.is_training = request.split == "train"
        self.ended_ns = 0
        self._request: dict[str, Value] = {
            "fleetbus.group": request.group_id,
            "fleetbus.task": request.task.key,
            "fleetbus.environment": request.task.env,
            "fleetbus.split": request.split,
            "fleetbus.policy": request.policy,
            "fleetbus.request.sequence": entry.sequence,
        }
        self._name = request.episode_id
        self._model = request.policy
        self._agent = request.task.env or request.policy
        self._prompts = PromptLengths()
        self._with_content = content
        self._said: dict[str, Value] = {}
        self._requested_ns = self._waiting_ns = self._seen_ns = entry.time_ns
        self._claim: AttemptStarted | None = None
        self._claimed_ns = self._claim_sequence = 0
        self._is_released = False
        self._turn: _Turn | None = None
        self._ahead: dict[int, tuple[StreamEntry, Observation]] = {}
        """By turn what was sent before the turns before it had their actions."""

    # What happens

    def apply_claim(self, entry: StreamEntry, claim: AttemptStarted) -> Iterator[Span]:
        """An attempt begins; all that the one before was doing is over."""
        self._sequence = entry.sequence
        before = self._claim
        if before is not None and not self._is_released:
            yield from self._end_attempt(self._seen_ns, "taken over", error="its worker was lost")
            since, path, lost = self._seen_ns, f"lost/{claim.attempt}", {"fleetbus.attempt": before.attempt}
            yield self._span("lost", path, ROOT, since, entry.time_ns, worker=before.worker, about=lost)
        else:
            about: dict[str, Value] = {"fleetbus.queue": "environment", "fleetbus.claim.sequence": entry.sequence}
            path = f"queue/{claim.attempt}"
            yield self._span("queue", path, ROOT, self._waiting_ns, entry.time_ns, worker=claim.worker, about=about)
        self._claim, self._claimed_ns, self._claim_sequence = claim, entry.time_ns, entry.sequence
        self._is_released, self._turn, self._seen_ns, self._ahead = False, None, entry.time_ns, {}

    def apply_release(self, entry: StreamEntry, release: AttemptReleased) -> Iterator[Span]:
        """A draining worker hands the episode back."""
        if self._claim is None or release.attempt != self._claim.attempt or self._is_released:
            return
        self._sequence = entry.sequence
        yield from self._end_attempt(entry.time_ns, "handed back")
        self._is_released, self._waiting_ns = True, entry.time_ns

    def apply_observation(self, entry: StreamEntry, observation: Observation) -> Iterator[Span]:
        """The environment's part of the turn before is over, the policy's of this one begins."""
        if self._claim is None or observation.attempt != self._claim.attempt:
            return
        turn = self._turn
        if turn is not None and observation.turn <= turn.number:
            turn.record_reroute(entry, observation)
            return
        if turn is not None and observation.ahead and (turn.action is None or observation.turn > turn.number + 1):
            self._ahead.setdefault(observation.turn, (entry, observation))
            return
        self._sequence, self._seen_ns = entry.sequence, entry.time_ns
        if turn is None:
            yield self._build_attempt_span("open", self._claimed_ns, entry.time_ns)
        else:
            yield from self._end_turn(turn, entry.time_ns, results=observation.messages)
        self._begin_turn(entry, observation)

    def _begin_turn(self, entry: StreamEntry, observation: Observation) -> None:
        self._ahead.pop(observation.turn, None)
        self._turn = _Turn(entry, observation)
        if self._with_content:
            self._note_content(self._turn, observation)

    def apply_action(self, entry: StreamEntry, action: Action) -> Iterator[Span]:
        """The policy's part of a turn is over; that of one that was sent ahead began beside those before it."""
        before = self._turn
        if before is not None and before.action is not None and before.is_followed_by(action) and action.turn in self._ahead:
            observed = self._ahead[action.turn]
            yield from self._end_turn(before, before.acted_ns, results=observed[1].messages)
            self._begin_turn(*observed)
        turn, claim = self._turn, self._claim
        if turn is None or claim is None or turn.action is not None or (action.attempt, action.turn) != turn.key:
            return
        self._sequence, self._seen_ns = entry.sequence, entry.time_ns
        turn.acted_ns, turn.action_sequence, turn.action = entry.time_ns, entry.sequence, action
        began = min(turn.observed_ns + to_nanoseconds(action.seconds_queued), entry.time_ns)
        path = build_turn_path(*turn.key)
        turn.attributes |= _describe_segment(action)
        about = turn.attributes | {"fleetbus.action.sequence": entry.sequence}
        about |= self._describe_agent("chat") | turn.content
        about |= {gen_ai.PROVIDER: gen_ai.PROVIDED, gen_ai.MODEL: self._model}
        about |= {gen_ai.INPUT_TOKENS: self._prompts.add(action), gen_ai.OUTPUT_TOKENS: count_tokens(action.sampled)}
        about |= {gen_ai.FINISH_REASONS: (action.finish_reason,)}
        if self._with_content:
            said = gen_ai.describe_output(action)
            about, self._said = about | said, self._said | said
        about |= {"fleetbus.tokens.prompt_delta": count_tokens(action.prompt_delta)}
        about |= {"fleetbus.policy.versions": tuple(span.version for span in action.versions)}
        if began > turn.observed_ns:
            waited = turn.attributes | {"fleetbus.queue": "inference"}
            yield self._build_inference_span("queue", path, turn.observed_ns, began, action, waited)
        apply_end = min(began + to_nanoseconds(action.seconds_generating), entry.time_ns)
        error = f"{action.error_class}: {action.error}" if action.finish_reason == "failed" else ""
        yield self._build_inference_span("generate", path, began, apply_end, action, about, error)

    def apply_result(self, entry: StreamEntry, result: EpisodeFinished) -> Iterator[Span]:
        """The result is stored; only training comes after it."""
        self._sequence = entry.sequence
        last = [(stage, to_nanoseconds(result.timings[stage])) for stage in ("verify", "close") if stage in result.timings]
        begins = max(entry.time_ns - sum(duration for _, duration in last), self._seen_ns)
        error = "" if result.outcome in GRADED else f"{result.outcome}: {result.error_class} {result.error}".strip()
        if self._claim is None or self._is_released:
            yield self._span("queue", "queue/none", ROOT, self._waiting_ns, entry.time_ns, error=error)
        else:
            yield from self._finish_attempt(entry, last, begins, result)
        about = self._request | {"fleetbus.outcome": result.outcome, "fleetbus.turns": result.turns}
        about |= self._describe_agent("invoke_agent") | self._said
        about |= {gen_ai.PROVIDER: gen_ai.PROVIDED, gen_ai.MODEL: self._model}
        about |= {
            "fleetbus.tokens": result.tokens,
            "fleetbus.attempts": result.attempts,
            "fleetbus.tool_calls": result.tool_calls,
        }
        about |= {"fleetbus.tool_errors": result.tool_errors, "fleetbus.result.sequence": entry.sequence}
        if result.reward is not None:
            about["fleetbus.reward"] = result.reward
        about |= {f"fleetbus.reward.{name}": value for name, value in result.reward_components.items()}
        if result.segments:
            about["fleetbus.segments"] = len(result.segments)
        self.ended_ns = entry.time_ns
        worker = result.worker
        yield self._span("episode", ROOT, "", self._requested_ns, entry.time_ns, worker=worker, error=error, about=about)

    def build_settlement_span(
        self,
        sequence: int,
        name: str,
        path: str,
        start_ns: int,
        end_ns: int,
        *,
        worker: str,
        about: Mapping[str, Value],
        link: tuple[int, int],
    ) -> Span:
        """A span of the learner, after the result."""
        self._sequence = sequence
        return self._span(name, path, ROOT, start_ns, end_ns, role="learner", worker=worker, about=about, links=(link,))

    # Building the trace

    def _finish_attempt(
        self, entry: StreamEntry, last: Sequence[tuple[str, int]], begins: int, result: EpisodeFinished
    ) -> Iterator[Span]:
        if self._turn is not None:
            yield from self._end_turn(self._turn, begins, is_answered=self._turn.action is not None)
            self._turn = None
        for stage, duration in last:
            ends = min(begins + duration, entry.time_ns)
            yield self._build_attempt_span(stage, begins, ends)
            begins = ends
        error = "" if result.outcome in GRADED else result.error_class or result.outcome
        yield from self._end_attempt(entry.time_ns, result.outcome, error=error)

    def _describe_agent(self, operation: str) -> dict[str, Value]:
        return gen_ai.describe_agent(operation, self._name, self._agent)

    def _note_content(self, turn: _Turn, observation: Observation) -> None:
        """Keep the messages that this turn adds to the conversation; the episode has its first prompt."""
        turn.content = gen_ai.describe_input(observation.messages, observation.tools)
        if observation.turn == 0:
            self._said = turn.content

    def _end_turn(
        self, turn: _Turn, end_ns: int, *, is_answered: bool = True, results: Sequence[ChatMessage] = ()
    ) -> Iterator[Span]:
        path = build_turn_path(*turn.key)
        about = turn.attributes | {"fleetbus.hops": turn.hops}
        if turn.action is not None:
            calls = turn.action.tool_calls
            about["fleetbus.action.sequence"] = turn.action_sequence
            part = turn.attributes | {"fleetbus.action.sequence": turn.action_sequence}
            if calls:
                part |= self._describe_agent("execute_tool") | gen_ai.describe_calls(calls)
                part |= gen_ai.describe_call_content(calls, results) if self._with_content else {}
            name = "tool" if calls else "step"
            yield self._span(name, f"{path}/environment", path, turn.acted_ns, end_ns, worker=self._worker, about=part)
        error = "" if is_answered else "no action"
        yield self._span(
            "turn", path, self._attempt_path, turn.observed_ns, end_ns, worker=self._worker, error=error, about=about
        )

    def _end_attempt(self, end_ns: int, how: str, *, error: str = "") -> Iterator[Span]:
        claim = self._claim
        assert claim is not None
        if self._turn is not None and how in ("taken over", "handed back"):
            yield from self._end_turn(self._turn, end_ns, is_answered=self._turn.action is not None)
            self._turn = None
        about: dict[str, Value] = {"fleetbus.attempt": claim.attempt, "fleetbus.attempt.reason": claim.reason}
        about |= {"fleetbus.attempt.end": how, "fleetbus.claim.sequence": self._claim_sequence}
        about |= {"fleetbus.resumed_at_turn": claim.resumed_at_turn, "fleetbus.lane": claim.lane}
        yield self._span(
            "attempt", self._attempt_path, ROOT, self._claimed_ns, end_ns, worker=claim.worker, error=error, about=about
        )

    def _build_attempt_span(self, name: str, start_ns: int, end_ns: int) -> Span:
        path, about = self._attempt_path, {"fleetbus.attempt": self._claim.attempt if self._claim else 0}
        return self._span(name, f"{path}/{name}", path, start_ns, end_ns, worker=self._worker, about=about)

    def _build_inference_span(
        self, name: str, path: str, start_ns: int, end_ns: int, action: Action, about: dict[str, Value], error: str = ""
    ) -> Span:
        return self._span(
            name, f"{path}/{name}", path, start_ns, end_ns, role="inference", worker=action.worker, error=error, about=about
        )

    @property
    def _attempt_path(self) -> str:
        return f"attempt/{self._claim.attempt if self._claim else 0}"

    @property
    def _worker(self) -> str:
        return self._claim.worker if self._claim else ""


class _Turn:
    """A turn that is not over."""

    def __init__(self, entry: StreamEntry, observation: Observation) -> None:
        self.number = observation.turn
        self.key = (observation.attempt, observation.turn)
        self.observed_ns = entry.time_ns
        self.acted_ns = self.action_sequence = 0
        self.action: Action | None = None
        self.hops = observation.hop
        self.content: dict[str, Value] = {}
        self.attributes: dict[str, Value] = {
            "fleetbus.attempt": observation.attempt,
            "fleetbus.turn": observation.turn,
            "fleetbus.observation.sequence": entry.sequence,
        }

    def is_followed_by(self, action: Action) -> bool:
        """True for the Action of the turn after it."""
        return (action.attempt, action.turn - 1) == self.key

    def record_reroute(self, entry: StreamEntry, observation: Observation) -> None:
        """To another engine: it still waits for the same action."""
        if observation.turn == self.number and self.action is None:
            self.hops = max(self.hops, observation.hop)
            self.attributes["fleetbus.observation.sequence"] = entry.sequence


def _describe_segment(action: Action) -> dict[str, Value]:
    """Of a turn that is not of the first segment, or begins one: which, and how it begins."""
    about: dict[str, Value] = {"fleetbus.segment": action.segment} if action.segment else {}
    if (origin := action.origin) is not None:
        about |= {"fleetbus.segment.reason": origin.reason, "fleetbus.segment.parent": origin.parent}
        about |= {"fleetbus.segment.kept": origin.kept, "fleetbus.segment.repeated": origin.repeated}
    return about
