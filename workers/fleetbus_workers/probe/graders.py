"""Graders as a probe asks them: a verifier with recorded or made conversations, or an environment that plays an episode.

The code under probe is the caller's own and may hang, raise, print or end: verifiers run isolated within a time limit,
environments within the limits of each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.core.probe.slots import DONE
from fleetbus_schemas import ChatMessage, ToolSpec
from fleetbus_workers.environment.base import TaskEnvironmentFactory
from fleetbus_workers.environment.check.episode import play_episode
from fleetbus_workers.environment.check.policies import Policy, build_scripted_policy
from fleetbus_workers.environment.isolation.verifier import Verifier
from fleetbus_workers.probe.cases import Case
from fleetbus_workers.replay.new_verifier import NewVerifier
from fleetbus_workers.replay.regrading import NoEnvironment

Verdict = tuple[float | None, str]
"""A reward, or None and the reason."""


class ProbeGrader(Protocol):
    """``ends``: what is said may need an end mark. ``is_isolated``: code in an answer can harm nothing here. ``idle`` are ways
    to play without reading the task, by name."""

    ends: bool
    is_isolated: bool
    idle: Sequence[str]

    def can_grade(self, case: Case) -> bool: ...

    async def grade(self, case: Case, text: str | None, *, after_work: bool) -> Verdict:
        """The verdict on ``text``, said after the turns before the answer or at once."""

    async def grade_idle(self, case: Case, name: str) -> Verdict: ...


class VerifierGrader:
    """Verifier code by task, inside `Verifier.run`."""

    ends = False
    is_isolated = True
    idle: Sequence[str] = ()

    def __init__(self, verifier: Verifier, code: NewVerifier) -> None:
        self._verifier = verifier
        self._code = code

    def can_grade(self, case: Case) -> bool:
        return self._code.find_code(case.task, case.task.key) is not None

    async def grade(self, case: Case, text: str | None, *, after_work: bool) -> Verdict:
        code = self._code.find_code(case.task, case.task.key) or ""
        conversation = [*case.conversation, {"role": "assistant", "content": text or ""}]
        verdict = await self._verifier.verify(code, final_answer=text, conversation=conversation, tools=NoEnvironment())
        return verdict.reward, verdict.reason

    async def grade_idle(self, case: Case, name: str) -> Verdict:
        raise NotImplementedError


class EnvironmentGrader:
    """An environment, open: each answer is an episode of its own."""

    ends = True
    is_isolated = False

    def __init__(self, factory: Any, configuration: Configuration) -> None:
        self._factory = factory
        self._configuration = configuration
        self.idle: Sequence[str] = tuple(_IDLE)

    def can_grade(self, case: Case) -> bool:
        return True

    async def grade(self, case: Case, text: str | None, *, after_work: bool) -> Verdict:
        before = case.before if after_work else ()
        return await self._play(case, build_scripted_policy([*before, text or ""]))

    async def grade_idle(self, case: Case, name: str) -> Verdict:
        return await self._play(case, partial(_IDLE[name]))

    async def _play(self, case: Case, policy: Policy) -> Verdict:
        factory = self._factory
        make = partial(factory.for_task, case.task) if isinstance(factory, TaskEnvironmentFactory) else factory
        turns = max(self._configuration.episode.max_turns, len(case.before) + 1)
        episode = await play_episode(make, case.task, policy, self._configuration, turns=turns)
        verdict = episode.verdict
        if verdict is not None and verdict.reward is not None and not episode.has_failed:
            return verdict.reward, verdict.reason
        problem = next((each for each in episode.problems if each.is_failure), None)
        if problem is not None:
            return None, f"{problem.text}{f' ({problem.location})' if problem.location else ''}"
        return None, (verdict.reason if verdict is not None else "") or "no verdict"


def _count_turns(messages: Sequence[ChatMessage]) -> int:
    return sum(each.role == "assistant" for each in messages)


def _build_call(tool: ToolSpec) -> str:
    call = {"name": tool.name, "arguments": _fill(tool.parameters)}
    return f"<tool_call>{msgspec.json.encode(call).decode()}</tool_call>"


def _fill(schema: Mapping[str, Any]) -> dict[str, object]:
    """The emptiest arguments that a schema allows."""
    known: Mapping[str, Any] = schema.get("properties") or {}
    return {name: _choose_empty(known.get(name) or {}) for name in schema.get("required") or ()}


def _choose_empty(schema: Mapping[str, Any]) -> object:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        return _fill(schema)
    return {"integer": 0, "number": 0, "boolean": False, "array": []}.get(kind if isinstance(kind, str) else "", "")


def _call_every_tool(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
    turn = _count_turns(messages)
    return _build_call(tools[turn]) if turn < len(tools) else f"Done.{DONE}"


def _call_one_tool_often(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
    return _build_call(tools[0]) if tools and _count_turns(messages) < 4 else f"Done.{DONE}"


def _call_unknown_tool(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
    unknown = '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'
    return unknown if not _count_turns(messages) else f"All done: everything went through.{DONE}"


_IDLE: dict[str, Policy] = {
    "every tool once with empty arguments": _call_every_tool,
    "one tool four times with empty arguments": _call_one_tool_often,
    "a tool that is not there, and a claim to be done": _call_unknown_tool,
}
