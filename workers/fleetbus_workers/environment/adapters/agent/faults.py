"""Evidence of who is at fault for an agent's end with an error, read off the last answer that it had. Pure.

An agent may break for any reason, and then nothing is trained. But where the policy's last answer could not be used - it cannot
be read, is empty, was cut, asks for what is not there - the end is the policy's. So it is where the agent, instead of using the
answer, asked anew for one of a forced format, which is refused here. See docs/decisions/0192.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from fleetbus_schemas import Action, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects.base import CHANGES_SAMPLING, Answer
from fleetbus_workers.environment.adapters.agent.dialects.formats import Format, find_unkept

SIGNALLED = 128
"""An exit status from here on says that a signal ended the program: the machine's doing, or a limit's."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was answered 400: its ``body``, and why."""

    body: bytes
    reason: str


def find_problems(action: Action, answer: Answer, tools: Sequence[ToolSpec], formats: Sequence[Format] = ()) -> Iterator[str]:
    """The parts of an answer that an agent that offers these ``tools``, and wants these ``formats``, cannot use."""
    yield from find_unkept(formats, answer.text, answer.tool_calls)
    if tools:
        yield from (f"a call that cannot be read: {error}" for error in action.tool_call_errors)
    if action.finish_reason == "length":
        yield f"cut after {answer.sampled_tokens} tokens"
    if not answer.text and not answer.tool_calls:
        yield "no text and no call"
    offered = {tool.name: tool for tool in tools}
    for call in answer.tool_calls:
        if call.name not in offered:
            yield f"a call of {call.name!r}, which is no tool of the agent"
        elif missing := [name for name in _list_required(offered[call.name]) if name not in call.arguments]:
            yield f"a call of {call.name!r} without {', '.join(missing)}"


def _list_required(tool: ToolSpec) -> list[str]:
    required = tool.parameters.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def find_repair(refused: Refused | None, answer: Answer) -> Iterator[str]:
    """The agent's attempt to get a better answer than this one, if ``refused`` is one: it forces a format, and the answer is
    no part of what it asks."""
    if refused is not None and CHANGES_SAMPLING in refused.reason and answer.text.strip():
        if not any(answer.text.strip() in text for text in _list_texts(msgspec.json.decode(refused.body))):
            yield f"instead of using it the agent asked for another: {refused.reason}"


def _list_texts(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict | list):
            left += each.values() if isinstance(each, dict) else each


def is_programs_error(status: int | None) -> bool:
    """True if a program ended with an error of its own."""
    return status is not None and 0 < status < SIGNALLED
