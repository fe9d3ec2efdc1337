"""Episodes as ATIF trajectories: one per episode, each further segment an embedded trajectory with what it copies marked so.

Of an episode with seats each seat is a trajectory (`SeatLayout`). Token ids and log-probabilities are those of the log. Reward,
outcome, task and versions stand under ``extra``, as does what an import needs to give the same episode back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetbus.core.episode.segments import SegmentError
from fleetbus.interchange.atif_format import VERSION, Agent, FinalMetrics, Metrics, ToolCall, Trajectory
from fleetbus.interchange.atif_seats import SeatLayout
from fleetbus.interchange.atif_steps import StepList
from fleetbus.interchange.episode_facts import build_episode_facts, find_episode_id, find_logprobs, find_versions, has_ids
from fleetbus.interchange.segment_contents import SegmentContent, fold_contents
from fleetbus.interchange.times import format_time
from fleetbus.recording.episodes import Transcript, TranscriptTurn
from fleetbus_schemas import Action, ToolSpec
from fleetbus_schemas import ToolCall as Call
from fleetbus_schemas.tokens import count_tokens, unpack_ids

NOTES = (
    "Written by fleetbus. total_steps counts the steps of this trajectory alone. Embedded trajectories are segments: token "
    "sequences that begin where the context was changed, or those of sub-agents; extra.reason says which."
)
SEAT_NOTES = (
    "Written by fleetbus. Several agents act in turn: this trajectory is that of the first, those of the others are embedded, "
    "and extra.seats has the policy, the reward and the tokens of each. total_steps counts the steps of a trajectory alone."
)


class Unwritable(ValueError):
    """An episode of which no trajectory can be made, and why."""


def build_trajectory(transcript: Transcript, *, run: str, version: str) -> Trajectory:
    """The trajectory of an episode. Raises `Unwritable`."""
    answered = [turn for turn in transcript.turns if turn.action is not None]
    actions = [turn.action for turn in answered if turn.action is not None]
    try:
        contents, prompts = fold_contents(actions)
    except (SegmentError, ValueError) as error:
        raise Unwritable(f"its turns are no tree of segments: {error}") from error
    layout = SeatLayout(transcript, answered, prompts, contents)
    builder = _Builder(transcript, answered, prompts, version, layout)
    root = builder.build_root(contents, run)
    further = [builder.build_segment(content) for content in contents[1:]]
    root.subagent_trajectories = further or None
    return root


class _Builder:
    """Trajectories of one episode; ``answered`` are its turns with an Action, ``prompts`` the packed ids of their prompts."""

    def __init__(
        self,
        transcript: Transcript,
        answered: Sequence[TranscriptTurn],
        prompts: Sequence[bytes],
        version: str,
        layout: SeatLayout,
    ) -> None:
        self._transcript = transcript
        self._answered = answered
        self._prompts = prompts
        self._version = version
        self._layout = layout
        self._steps: dict[int, StepList] = {}
        self._episode = find_episode_id(transcript)
        actions = [turn.action for turn in answered if turn.action is not None]
        self._has_ids = all(map(has_ids, actions))

    def build_root(self, contents: Sequence[SegmentContent], run: str) -> Trajectory:
        """The first segment, with what is known of the episode; references to further segments come with those."""
        steps, layout = self._steps.setdefault(0, StepList()), self._layout
        for turn in contents[0].turns if contents else ():
            self._add_turn(steps, turn)
        self._add_end(0)
        if not steps.steps:
            request = self._transcript.request
            steps.add("user", request.task.prompt if request else "", extra={"note": "no turn was played"})
        names = [self._name(content.number) for content in contents]
        seats = {"seat": layout.name_seat(0), "seats": layout.describe_all(names)} if layout.has_seats else {}
        return Trajectory(
            schema_version=VERSION,
            session_id=f"{run}/{self._episode}",
            trajectory_id=self._name(0),
            agent=self._build_agent(0, contents[0].turns if contents else ()),
            steps=steps.steps,
            notes=SEAT_NOTES if layout.has_seats else NOTES if len(contents) > 1 else None,
            final_metrics=self._build_final(0),
            extra=build_episode_facts(self._transcript, run) | seats,
        )

    def build_segment(self, content: SegmentContent) -> Trajectory:
        """A further segment, referred to from the step before it began."""
        assert content.origin is not None
        steps, layout = self._steps.setdefault(content.number, StepList()), self._layout
        for held in content.copied:
            turn = self._answered[held.turn]
            if held.is_answer:
                self._add_answer(steps, held.turn, copied=True)
            else:
                for message in turn.messages:
                    steps.add_message(message, copied=True)
        for number in content.turns:
            self._add_turn(steps, number)
        self._add_end(content.number)
        name = self._name(content.number)
        extra = {
            "segment": content.number,
            "reason": content.origin.reason,
            "origin": list(msgspec.structs.astuple(content.origin)),
        }
        extra |= layout.describe(content.number) if layout.has_seats else {}
        is_seat = layout.has_seats and layout.find_home(content.number) == content.number
        owner = layout.find_referrer(content)
        self._steps[owner].refer(name, {"reason": content.origin.reason}, turn=content.after)
        return Trajectory(
            schema_version=VERSION,
            trajectory_id=name,
            agent=self._build_agent(content.number, content.turns),
            steps=steps.steps,
            final_metrics=self._build_final(content.number) if is_seat else FinalMetrics(total_steps=len(steps.steps)),
            extra=extra,
        )

    def _name(self, segment: int) -> str:
        return f"{self._episode}.{segment}" if segment else self._episode

    def _build_final(self, segment: int) -> FinalMetrics:
        prompt, sampled = self._layout.count_tokens(segment)
        steps = len(self._steps[segment].steps)
        return FinalMetrics(total_prompt_tokens=prompt, total_completion_tokens=sampled, total_steps=steps)

    def _add_end(self, segment: int) -> None:
        """Add the words after the last answer, if they belong to this segment."""
        waiting = [turn for turn in self._transcript.turns if turn.action is None]
        if waiting and self._layout.find_waiting(waiting[0]) == segment:
            for message in waiting[0].messages:
                self._steps[segment].add_message(message)
        if self._layout.find_last() == segment:
            self._add_last_observation(self._steps[segment])

    def _add_turn(self, steps: StepList, number: int) -> None:
        for message in self._answered[number].messages:
            steps.add_message(message)
        self._add_answer(steps, number)

    def _add_answer(self, steps: StepList, number: int, *, copied: bool = False) -> None:
        turn = self._answered[number]
        assert turn.action is not None
        calls = build_calls(turn.action)
        step = steps.add("agent", turn.action.text, copied=copied, timestamp=format_time(turn.time_ns), turn=number)
        step.tool_calls = calls or None
        if copied:
            step.extra = {"turn": turn.turn}
            return
        step.metrics = build_metrics(turn.action, self._prompts[number], with_ids=self._has_ids)
        step.extra = build_step_facts(turn)

    def _add_last_observation(self, steps: StepList) -> None:
        """The environment's words after the last answer, which the policy did not see."""
        result = self._transcript.result
        if result is not None and result.last_observation:
            steps.add_result(result.last_observation, {"seen": False})

    def _build_agent(self, segment: int, turns: Sequence[int]) -> Agent:
        tools = next((self._answered[turn].tools for turn in turns if self._answered[turn].tools), ())
        seat = self._layout.name_seat(segment)
        return Agent(
            name=seat or "fleetbus",
            version=self._version,
            model_name=self._layout.find_policy(seat),
            tool_definitions=[build_tool(tool) for tool in tools] or None,
        )


def build_calls(action: Action) -> list[ToolCall]:
    """Calls with an id each; one that the protocol had none for is named by its place."""
    return [
        ToolCall(
            tool_call_id=call.id or f"turn-{action.turn}-{place}",
            function_name=call.name,
            arguments=call.arguments,
            extra=_list_call_facts(call) or None,
        )
        for place, call in enumerate(action.tool_calls)
    ]


def _list_call_facts(call: Call) -> dict[str, Any]:
    """Facts that the formats have no field for: that a call had no id, and its arguments as they stood in the text."""
    facts = {} if call.id else {"id": ""}
    return facts | ({"arguments_text": call.arguments_text} if call.arguments_text else {})


def build_tool(tool: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI's function calling describes it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def build_metrics(action: Action, prompt: bytes, *, with_ids: bool) -> Metrics:
    """Counts, and the ids and log-probabilities themselves, unless ids of the episode were taken out with a secret or are no
    whole ones."""
    metrics = Metrics(prompt_tokens=count_tokens(prompt), completion_tokens=count_tokens(action.sampled))
    metrics.extra = {"policy_versions": find_versions(action)}
    if with_ids:
        metrics.prompt_token_ids, metrics.completion_token_ids = unpack_ids(prompt), unpack_ids(action.sampled)
        metrics.logprobs = find_logprobs(action)
    return metrics


def build_step_facts(turn: TranscriptTurn) -> dict[str, Any]:
    """The facts of a turn that the format has no field for."""
    action = turn.action
    assert action is not None
    facts: dict[str, Any] = {"turn": turn.turn, "attempt": turn.attempt, "finish_reason": action.finish_reason}
    facts |= {"worker": action.worker} if action.worker else {}
    facts |= {"seat": turn.seat} if turn.seat else {}
    facts |= {"segment": action.segment} if action.segment else {}
    facts |= {"tool_call_errors": list(action.tool_call_errors)} if action.tool_call_errors else {}
    facts |= {"images": [list(msgspec.structs.astuple(image)) for image in action.images]} if action.images else {}
    return facts


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """As JSON on one line."""
    return msgspec.json.encode(trajectory)
