"""The steps of one trajectory as a conversation grows: results of tools stand with the answer that asked for them."""

from __future__ import annotations

from typing import Any, Literal

from fleetbus.interchange.atif_format import (
    MEDIA_TYPES,
    OBJECT_PATH,
    Content,
    Observation,
    Result,
    Source,
    Step,
    SubagentReference,
)
from fleetbus_schemas import ChatMessage, Image, Text


class StepList:
    """Steps numbered from 1. ``steps`` are those so far."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._by_turn: dict[int, Step] = {}

    def add(
        self,
        source: Literal["system", "user", "agent"],
        message: str | list[Content],
        *,
        copied: bool = False,
        timestamp: str | None = None,
        extra: dict[str, Any] | None = None,
        turn: int | None = None,
    ) -> Step:
        """Append a step; ``turn`` is the turn of the episode that it answers."""
        step = Step(
            step_id=len(self.steps) + 1,
            source=source,
            message=message,
            timestamp=timestamp,
            is_copied_context=True if copied else None,
            extra=extra,
        )
        self.steps.append(step)
        if turn is not None:
            self._by_turn[turn] = step
        return step

    def add_message(self, message: ChatMessage, *, copied: bool = False) -> None:
        """Append what the policy was shown; an assistant's message among it was not sampled here, so it is copied context."""
        if message.role == "tool":
            self._add_tool_message(message, copied)
            return
        if message.role == "assistant":
            extra = {"shown": True} | ({"reasoning": message.reasoning} if message.reasoning else {})
            self.add("agent", build_content(message.content), copied=True, extra=extra)
            return
        extra = {"name": message.name} if message.name else {}
        self.add(message.role, build_content(message.content), copied=copied, extra=extra or None)

    def add_result(self, content: str | list[Content], extra: dict[str, Any]) -> None:
        """Append a result to the last step, of the call that alone has none yet if it is so."""
        calls = [call.tool_call_id for call in self.steps[-1].tool_calls or ()] if self.steps else []
        if self.steps:
            self._append(
                self.steps[-1], Result(source_call_id=calls[0] if len(calls) == 1 else None, content=content, extra=extra)
            )

    def refer(self, name: str, extra: dict[str, Any], *, turn: int) -> None:
        """Refer to an embedded trajectory from the last answer up to ``turn``."""
        before = [number for number in self._by_turn if number <= turn]
        step = self._by_turn[max(before)] if before else self.steps[-1]
        self._append(step, Result(subagent_trajectory_ref=[SubagentReference(trajectory_id=name, extra=extra)]))

    def _add_tool_message(self, message: ChatMessage, copied: bool) -> None:
        """As a result of the last step if that is an answer, else as a step of the system."""
        facts = {"name": message.name} if message.name else {}
        step = self.steps[-1] if self.steps else None
        if step is None or step.source != "agent":
            facts |= {"role": "tool", "tool_call_id": message.tool_call_id}
            self.add("system", build_content(message.content), copied=copied, extra=facts)
            return
        taken = {result.source_call_id for result in step.observation.results} if step.observation else set()
        calls = [call.tool_call_id for call in step.tool_calls or ()]
        call = message.tool_call_id or next((each for each in calls if each not in taken), None)
        if not message.tool_call_id or call not in calls:
            facts |= {"tool_call_id": message.tool_call_id}
        source = call if call in calls else None
        self._append(
            step, Result(source_call_id=source, content=build_content(message.content), extra={"role": "tool", **facts})
        )

    def _append(self, step: Step, result: Result) -> None:
        if step.observation is None:
            step.observation = Observation(results=[])
        step.observation.results.append(result)


def build_content(content: str | tuple[Text | Image, ...]) -> str | list[Content]:
    """Text, or texts and images in order; an image is named by its hash."""
    return content if isinstance(content, str) else [_build_part(part) for part in content]


def _build_part(part: Text | Image) -> Content:
    if isinstance(part, Text):
        return Content(type="text", text=part.text or (f"[object {part.object}]" if part.object else ""))
    if part.media_type not in MEDIA_TYPES:
        return Content(type="text", text=f"[object {part.object} of type {part.media_type}]")
    return Content(type="image", source=Source(media_type=part.media_type, path=OBJECT_PATH + part.object))
