"""Both ends of an environment that is played with tools: what a policy says, what it sees, and graders that need no process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio

from fleetbus_schemas import Action, ToolCall
from fleetbus_workers.environment.base import Step, Verdict
from fleetbus_workers.environment.isolation.verifier import VerifierTools


def say(text: str, *calls: ToolCall, turn: int = 0) -> Action:
    return Action(episode_id="e", attempt=1, turn=turn, text=text, tool_calls=calls)


def tool_call(tool: str, /, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": tool, "arguments": arguments}) + "</tool_call>"


def call(tool: str, /, **arguments: Any) -> Action:
    return say(tool_call(tool, **arguments))


def read_step_text(step: Step) -> str:
    """The one message of a step, which must be text."""
    (message,) = step.messages
    assert message.role == "user"
    assert isinstance(message.content, str)
    return message.content


class NoGrader:
    """For episodes that nobody here grades."""

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        raise AssertionError("nothing is graded here")


class ConstantGrader:
    """Gives the reward 1.0 to whatever it is asked about."""

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=1.0)
