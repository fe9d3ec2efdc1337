"""ATIF trajectories as episodes: each answer of the agent is a turn, and was shown all messages since the one before.

Token ids are taken as they are: a prompt that goes on where the last answer ended extends the sequence, any other
begins a segment. Embedded trajectories are segments too, played where they are referred to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus.interchange.atif_content import read_calls, read_content, read_messages_of, read_step_message, read_tools
from fleetbus.interchange.atif_format import Step, Trajectory
from fleetbus.interchange.episode_facts import KEY, read_messages, read_text
from fleetbus.interchange.imported import ImportedEpisode, ImportedTurn
from fleetbus.interchange.times import parse_time
from fleetbus.interchange.token_sequences import place_tokens
from fleetbus.interchange.turn_facts import read_turn_facts
from fleetbus_schemas import ChatMessage, SegmentOrigin
from fleetbus_schemas.message import UNREADABLE

MAX_DEPTH = 8
"""Sub-agents of sub-agents."""

MAX_TURNS = 10_000

_decode = msgspec.json.Decoder(Trajectory).decode


class ReadTurn(msgspec.Struct, kw_only=True):
    """A turn as it was found: ``order`` is the turn that fleetbus wrote (None: another's file), ``trajectory`` the number of
    the one it stands in, in the order in which they begin; ``prompt`` are the ids of its whole prompt."""

    turn: ImportedTurn
    trajectory: int
    order: int | None
    origin: SegmentOrigin | None
    prompt: list[int] | None
    sampled: list[int] | None
    logprobs: list[float] | None


def read_trajectory(data: bytes, place: str) -> ImportedEpisode:
    """The episode of a trajectory. Raises `UserError` for what is none."""
    try:
        root = _decode(data)
    except UNREADABLE as error:
        raise UserError(f"{place} is no ATIF trajectory: {error}") from error
    reader = _Reader(place)
    reader.walk(root, 0)
    facts = root.extra or {}
    request, result = read_messages(facts, place)
    first = next((step for step in root.steps if step.source == "user"), root.steps[0])
    message = read_content(first.message)
    turns = place_tokens(reader.ordered(), place)
    return ImportedEpisode(
        place=place,
        name=root.trajectory_id or root.session_id or place,
        turns=turns,
        request=request,
        result=result,
        facts={**facts, "policy": read_text(facts.get("policy")) or root.agent.model_name or root.agent.name},
        prompt=message if isinstance(message, str) else " ".join(getattr(part, "text", "") for part in message),
        last_observation=reader.last_observation,
        time_ns=turns[0].time_ns if turns else 0,
        finished=result is not None or KEY not in facts,
    )


class _Reader:
    """Collects turns over a trajectory and those in it."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._turns: list[ReadTurn] = []
        self._trajectories = 0
        self.last_observation = ""

    def ordered(self) -> list[ReadTurn]:
        """The turns as they were played: in the order that fleetbus wrote, if it wrote all of them."""
        orders = [read.order for read in self._turns]
        if sorted(order for order in orders if order is not None) == list(range(len(orders))):
            return sorted(self._turns, key=lambda read: read.order or 0)
        return self._turns

    def walk(self, trajectory: Trajectory, depth: int) -> None:
        """Add the turns of a trajectory, and after each those of the trajectories that it refers to."""
        if depth > MAX_DEPTH:
            raise UserError(f"{self._place}: its trajectories stand more than {MAX_DEPTH} deep in each other")
        number, self._trajectories = self._trajectories, self._trajectories + 1
        inner = {each.trajectory_id: each for each in trajectory.subagent_trajectories or () if each.trajectory_id}
        origin, tools = read_origin(trajectory.extra), read_tools(trajectory.agent.tool_definitions)
        keeps = origin is not None and origin.parent >= 0
        shown: list[ChatMessage] = []
        for step in trajectory.steps:
            if keeps and step.is_copied_context:
                continue
            if step.source == "agent" and not step.is_copied_context and step.llm_call_count != 0:
                self._add(step, shown, number, origin, tools)
                shown, tools = [], ()
            else:
                shown.append(read_step_message(step))
            shown += read_messages_of(step)
            for name in list_references(step):
                if name in inner:
                    self.walk(inner.pop(name), depth + 1)
        for left in inner.values():
            self.walk(left, depth + 1)
        if shown and (last := read_last(shown)):
            self.last_observation = last

    def _add(
        self, step: Step, shown: list[ChatMessage], trajectory: int, origin: SegmentOrigin | None, tools: Sequence[Any]
    ) -> None:
        if len(self._turns) >= MAX_TURNS:
            raise UserError(f"{self._place} has more than {MAX_TURNS} answers")
        metrics, facts = step.metrics, step.extra or {}
        content = read_content(step.message)
        text = content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content)
        turn = ImportedTurn(
            messages=shown, text=text, tool_calls=read_calls(step), tools=tuple(tools), time_ns=parse_time(step.timestamp)
        )
        versions = (metrics.extra or {}).get("policy_versions") if metrics is not None else None
        order = read_turn_facts(turn, {**facts, "policy_versions": versions}, self._place)
        read = ReadTurn(
            turn=turn,
            trajectory=trajectory,
            order=order,
            origin=origin,
            prompt=metrics.prompt_token_ids if metrics is not None else None,
            sampled=metrics.completion_token_ids if metrics is not None else None,
            logprobs=metrics.logprobs if metrics is not None else None,
        )
        self._turns.append(read)


def list_references(step: Step) -> list[str]:
    """The embedded trajectories that a step refers to, by id."""
    results = step.observation.results if step.observation is not None else []
    return [each.trajectory_id for result in results for each in result.subagent_trajectory_ref or () if each.trajectory_id]


def read_origin(extra: dict[str, Any] | None) -> SegmentOrigin | None:
    """The place where a segment leaves another one, as fleetbus wrote it."""
    try:
        return msgspec.convert((extra or {}).get("origin"), SegmentOrigin)
    except msgspec.ValidationError:
        return None


def read_last(shown: Sequence[ChatMessage]) -> str:
    """The text that came last."""
    content = shown[-1].content
    return content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content)
