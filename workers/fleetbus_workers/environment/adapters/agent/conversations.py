"""The turns of one agent: which call is played next, where it belongs, what the policy's action answers.

Calls that come while another is in play are attached at once, unless they continue a conversation that has no answer yet, and
told ahead: they are sampled beside it, and played in the order in which they came.

Above it are the environments of agents that are started here and of those that run elsewhere; below it the calls of a session
and the paths of its conversations.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import structlog

from fleetbus.core.text.reasoning import remove_reasoning
from fleetbus.core.text.tool_formats import TOOL_FORMATS, build_call_id, parse_response
from fleetbus_schemas import Action, ChatMessage, ContextChange, Observation, ToolCall, ToolSpec, UntrainedReason, UntrainedTurn
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer, InvalidCall, StopReason
from fleetbus_workers.environment.adapters.agent.dialects.formats import Format, find_unkept
from fleetbus_workers.environment.adapters.agent.faults import find_problems, find_repair
from fleetbus_workers.environment.adapters.agent.models import OTHER_SEAT, UNTRAINED_MODEL, find_seat
from fleetbus_workers.environment.adapters.agent.paths import Attachment, Paths, identify
from fleetbus_workers.environment.adapters.agent.sessions import AgentEnded, AgentSession, PendingCall
from fleetbus_workers.environment.adapters.agent.side_calls import Line, describe_line, find_side_turns, is_probe
from fleetbus_workers.environment.base import NO_LIMITS, Ahead, TurnLimits

log = structlog.get_logger(__name__)


class _Call(NamedTuple):
    """A call with its place, before it is in play. ``asked`` is kept beside ``pending``, which forgets it with its answer: that
    of a session that ends comes before it is in play."""

    pending: PendingCall
    asked: AgentCall
    attached: Attachment
    seat: str

    @property
    def limits(self) -> TurnLimits:
        return TurnLimits(max_tokens=self.asked.max_tokens, stop=self.asked.stop)


class Conversations:
    """All that one agent said and was answered; one call in play at a time, and its answer."""

    def __init__(self, session: AgentSession, *, trains_side_calls: bool = False) -> None:
        self._session = session
        self._trains_side_calls = trains_side_calls
        self._lines: dict[int, Line] = {}
        self._paths = Paths()
        self._next: deque[_Call] = deque()
        """Calls that were told ahead, in the order in which they will be in play."""
        self._held: PendingCall | None = None
        """A call that came after those, and has to wait for an answer to one of them."""
        self._pending: PendingCall | None = None
        self._attached: Attachment | None = None
        self._tools: dict[int, tuple[ToolSpec, ...]] = {}
        self._given: list[PendingCall] = []
        self._others: set[int] = set()
        """Turns that asked for `UNTRAINED_MODEL`."""
        self._last_given: dict[int, PendingCall] = {}
        """By segment the answer that it ends with."""
        self._turns_by_words: dict[tuple[bytes, bytes], list[int]] = {}
        """The turns that said the same to the same, by what identifies both, but for words that an agent had before."""
        self._words_before: set[bytes] = set()
        """What assistants say in the conversations that began."""
        self._problems: tuple[str, ...] = ()
        self._last: Answer | None = None
        self._formats: tuple[Format, ...] = ()
        """Wanted of the answer to the call in play."""
        self._formats_asked = 0
        self._formats_kept = 0
        self.turn_limits = NO_LIMITS
        """Of the answer to the call in play."""
        self.seat = ""
        """Of the call in play; empty in sessions without seats."""
        self._seats: set[str] = set()
        self._segment = 0
        self._answers = 0
        self._tool_calls = 0
        self.messages: list[ChatMessage] = []
        """In the order in which they were said, as a verifier sees them."""

    @property
    def final_answer(self) -> str | None:
        return next((str(said.content) for said in reversed(self.messages) if said.role == "assistant"), None)

    @property
    def segment_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the call in play offers."""
        return self._tools.get(self._attached.segment, ()) if self._attached is not None else ()

    async def receive_call(self) -> Attachment | None:
        """The next call that can be played; others are refused. Answer it with `answer`. None when the agent has ended."""
        is_told = self._next and not self._session.concluded.is_set()  # of an agent that has ended nobody waits for those
        call = self._next.popleft() if is_told else await self._next_call()
        if call is None:
            return None
        self._pending, self._formats, self.seat = call.pending, call.asked.formats, call.seat
        self.turn_limits = call.limits
        self._enter(call.attached, call.asked.max_tokens)
        return call.attached

    async def receive_ahead(self) -> Ahead | None:
        """The next call that comes while another is in play, if it stands on none that has no answer; None if there is none
        before that one is answered."""
        if self._held is not None:
            return None
        call = await self._next_call(is_ahead=True)
        if call is None:
            return None
        self._next.append(call)
        attached = call.attached
        if attached.reason is not None:
            change = ContextChange(reason=attached.reason, tools=attached.tools)
        else:
            change = ContextChange(resume=attached.segment)
        return Ahead(messages=attached.messages, seat=call.seat, context=change, tools=attached.tools, limits=call.limits)

    async def _next_call(self, *, is_ahead: bool = False) -> _Call | None:
        """The next call with its place; None when the agent has ended, or, ahead of others, for one that has to wait."""
        while True:
            try:
                pending = await self._take_call()
            except AgentEnded:
                return None
            try:
                asked = pending.call
                seat = self._choose_seat(asked.model)
                if is_ahead and self._paths.continues_open(asked.messages, asked.tools, seat):
                    self._held = pending
                    return None
                attached = self._paths.attach(asked.messages, asked.tools, seat)
            except InvalidCall as invalid:
                log.warning("agent call is invalid; refusing it", reason=str(invalid))
                pending.set_answer(invalid)
                continue
            self._seats.add(seat)
            return _Call(pending, asked, attached, seat)

    async def _take_call(self) -> PendingCall:
        """Raises `AgentEnded`."""
        held, self._held = self._held, None
        is_wanted = held is not None and not self._session.concluded.is_set() and self._session.is_wanted(held)
        return held if held is not None and is_wanted else await self._session.next_call()

    def restore_call(self, observed: Observation, *, own_stops: Sequence[str] = ()) -> Attachment:
        """The same for a call of which only the log is left: it is where its observation says. ``own_stops`` are the episode's:
        those after them are the call's (`TurnLimits.apply`)."""
        begins = observed.origin is not None or not self._tools
        attached = Attachment(
            segment=observed.segment,
            messages=observed.messages,
            tools=observed.tools if begins else (),
            reason=observed.origin.reason if observed.origin is not None else None,
        )
        self._pending, self._formats, self.seat = None, (), observed.seat
        self.turn_limits = TurnLimits(stop=observed.sampling.stop[len(own_stops) :])
        self._paths.restore(attached, tools=self._tools.get(observed.segment, observed.tools), seat=observed.seat)
        self._enter(attached, None)
        return attached

    def _choose_seat(self, model: str) -> str:
        """The seat of a call. Raises `InvalidCall` where an episode that began without seats is asked for one."""
        seat = find_seat(model)
        if self._lines and bool(seat) != bool(self.seat):
            if seat:
                raise InvalidCall(f"the first call of this session named no seat, and this one names {seat}: name one in each")
            seat = OTHER_SEAT
        if seat and seat not in self._seats and len(self._seats) == MAX_SEATS:
            raise InvalidCall(f"{MAX_SEATS} seats have called in this session, which is the most, and {seat} is one more")
        return seat

    def _enter(self, attached: Attachment, max_tokens: int | None) -> None:
        self._attached = attached
        self._seats.add(self.seat)
        if (given := self._last_given.get(attached.segment)) is not None:
            given.delivered = True  # what follows an answer proves that it came
        if attached.segment not in self._lines:
            self._find_delivered(attached.messages)
            self._tools[attached.segment] = attached.tools
            self._lines[attached.segment] = describe_line(attached.messages, attached.tools, max_tokens)
        self.messages += attached.messages
        self._session.responses.add_messages(attached.segment, attached.messages)

    def _find_delivered(self, messages: Sequence[ChatMessage]) -> None:
        """An answer of another segment in a conversation, after what it answered, proves that it came; words said twice prove
        none. See docs/decisions/0236."""
        for asked, said in itertools.pairwise((*messages[:1], *messages)):
            if said.role == "assistant":
                words = identify(said)
                if len(turns := self._turns_by_words.get((identify(asked), words), [])) == 1:
                    self._given[turns[0]].delivered = True
                self._words_before.add(words)

    def answer(self, action: Action) -> Answer:
        """Pass the policy's turn to whoever waits for it."""
        assert self._attached is not None
        calls = self._number_calls(action)
        answer = self._build_answer(action, calls)
        self.messages.append(ChatMessage(role="assistant", content=answer.text, tool_calls=calls))
        self._session.responses.add_answer(self._attached.segment, answer.id, self.messages[-1])
        asked = self._paths.add_answer(self._attached.segment, self.messages[-1])
        self._tool_calls += len(answer.tool_calls)
        pending = self._pending or self._session.remember(asked)
        if pending.call.model == UNTRAINED_MODEL:
            self._others.add(len(self._given))
        self._problems = tuple(find_problems(action, answer, self.segment_tools, self._formats))
        self._count_formats(answer)
        self._last, self._session.refused = answer, None
        is_given = pending.set_answer(answer)
        self._lines[self._attached.segment].turns.append(len(self._given))
        if (
            self._attached.messages
            and (answer.text or calls)
            and (words := identify(self.messages[-1])) not in self._words_before
        ):
            question = identify(self._attached.messages[-1])
            self._turns_by_words.setdefault((question, words), []).append(len(self._given))
        self._given.append(pending if is_given else PendingCall(AgentCall(messages=())))
        self._last_given[self._attached.segment] = pending
        return answer

    def _count_formats(self, answer: Answer) -> None:
        """Count an answer of which a format was wanted; those before a takeover were counted by another process."""
        if self._formats:
            self._formats_asked += 1
            self._formats_kept += not any(find_unkept(self._formats, answer.text, answer.tool_calls))

    def find_fault(self) -> dict[str, object]:
        """The evidence that an agent that breaks now does so for the policy's last answer; empty if there is none, and where
        that was an answer beside the task, or to a probe, which is cut by what it asks for."""
        if self._last is None or not self._given[-1].delivered:
            return {}
        turn = len(self._given) - 1
        if any(turn in line.turns and is_probe(line) for line in self._lines.values()) or turn in self._find_side_turns():
            return {}
        problems = [*self._problems, *find_repair(self._session.refused, self._last)]
        return {"turn": turn, "problems": problems} if problems else {}

    def list_untrained(self) -> tuple[UntrainedTurn, ...]:
        """The turns whose answers no request of the agent got, as far as one can tell, and its calls beside the task."""
        reasons: dict[int, UntrainedReason] = dict.fromkeys(self._find_side_turns(), "side_call")
        reasons |= {turn: "not_delivered" for turn, given in enumerate(self._given) if not given.delivered}
        return tuple(UntrainedTurn(turn=turn, reason=reasons[turn]) for turn in sorted(reasons))

    def _find_side_turns(self) -> list[int]:
        beside = [] if self._trains_side_calls or self.seat else find_side_turns(list(self._lines.values()))
        return sorted({*beside, *self._others})

    def follow(self, attached: Attachment) -> ContextChange | None:
        """The change of the policy's context after the segment of the turn before."""
        before, self._segment = self._segment, attached.segment
        if attached.reason is not None:
            return ContextChange(reason=attached.reason, tools=attached.tools)
        return None if attached.segment == before else ContextChange(resume=attached.segment)

    def describe(self) -> dict[str, object]:
        side_calls = len(self._find_side_turns())
        counted: dict[str, object] = {"side_calls": side_calls} if side_calls else {}
        if self._formats_asked:
            counted |= {"formats_asked": self._formats_asked, "formats_kept": self._formats_kept}
        return {"calls_extending": self._paths.extended, "segments_begun": dict(self._paths.reasons), **counted}

    def describe_state(self) -> dict[str, object]:
        return {"calls": self._answers, "tool_calls": self._tool_calls, **self.describe()}

    def _number_calls(self, action: Action) -> tuple[ToolCall, ...]:
        """The calls of an action, with ids also where the policy's format has none. An agent that offers no tools reads calls,
        if it does, from the text."""
        return tuple(
            call if call.id else msgspec.structs.replace(call, id=build_call_id(self._tool_calls + number))
            for number, call in enumerate(action.tool_calls if self.segment_tools else ())
        )

    def _build_answer(self, action: Action, calls: tuple[ToolCall, ...]) -> Answer:
        """The action as a model's answer."""
        if not self.segment_tools:
            action = msgspec.structs.replace(action, tool_calls=(), tool_call_errors=())
        reason: StopReason = "tool_calls" if calls else "length" if action.finish_reason == "length" else "stop"
        self._answers += 1
        ids = self._session.call_ids
        text, stopped_by = cut_at_stop(read_content(action), self.turn_limits.stop)
        return Answer(
            number=self._answers,
            id=ids.make(self._answers),
            created=int(time.time()),
            text=text,
            stopped_by=stopped_by,
            tool_calls=ids.show(calls, self._answers),
            stop_reason=reason,
            prompt_tokens=count_tokens(action.prompt_delta),
            sampled_tokens=count_tokens(action.sampled),
        )


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the first of ``stops`` in it, and which that is; as it was and an empty text if there is none."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, ""
    place, stop = min(found)
    return text[:place], stop


def read_content(action: Action) -> str:
    """The text of an action without reasoning and calls, whichever format the model writes."""
    if not action.tool_calls and not action.tool_call_errors:
        return remove_reasoning(action.text).strip()
    for tool_format in TOOL_FORMATS:
        parsed = parse_response(remove_reasoning(action.text), tool_format)
        if len(parsed.calls) == len(action.tool_calls):
            return parsed.content
    return ""
