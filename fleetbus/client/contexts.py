"""The contexts of a policy whose client drives an environment step by step, as the environment asks for them. Pure.

    contexts = PolicyContexts(start.messages, start.tools)
    while not answer.terminated:
        text = complete(contexts.messages, contexts.tools)
        answer = await session.step(text)
        contexts.extend(text, answer)

They change as those of an episode do that environment workers play with the run's own policy (docs/concepts/episode.md). What
was sampled in a context that is left remains to be trained: `PolicyContexts.segments` has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fleetbus_schemas import ChatMessage, ContextChange, SessionAnswer, ToolSpec


class PolicyContext(msgspec.Struct, kw_only=True):
    """One segment: its messages, and the positions of the policy's answers among them."""

    messages: list[ChatMessage]
    tools: tuple[ToolSpec, ...] = ()
    answers: list[int] = msgspec.field(default_factory=list)


class PolicyContexts:
    """All segments of one episode, by number; the policy is in `current`."""

    def __init__(self, messages: Iterable[ChatMessage], tools: Sequence[ToolSpec] = ()) -> None:
        self.current = PolicyContext(messages=list(messages), tools=tuple(tools))
        self.segments = [self.current]

    @property
    def messages(self) -> list[ChatMessage]:
        """The messages that the policy reads next."""
        return self.current.messages

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the present context began with."""
        return self.current.tools

    def extend(self, text: str, answer: SessionAnswer) -> None:
        """The policy said ``text``, and the environment answered. Raises `ValueError` for a segment that was never begun."""
        self.current.answers.append(len(self.current.messages))
        self.current.messages.append(ChatMessage(role="assistant", content=text))
        if answer.context is not None:
            self._change(answer.context)
        self.current.messages += answer.messages

    def _change(self, change: ContextChange) -> None:
        if change.resume is not None:
            if not 0 <= change.resume < len(self.segments):
                raise ValueError(f"segment {change.resume} cannot be gone on with: {len(self.segments)} were begun")
            self.current = self.segments[change.resume]
            return
        left, kept = self.current, change.keep_turns
        if kept and len(left.answers) <= kept:  # there is nothing to drop
            return
        if kept:
            prompt, last = left.answers[0], left.answers[-kept]
            answers = [place - last + prompt for place in left.answers[-kept:]]
            messages = left.messages[:prompt] + left.messages[last:]
            self.current = PolicyContext(messages=messages, tools=left.tools, answers=answers)
        else:
            self.current = PolicyContext(messages=[], tools=change.tools)
        self.segments.append(self.current)


def describe_context(change: ContextChange | None) -> dict[str, Any]:
    """``context`` for clients of other protocols, who find it in what a step returns beside its observation; nothing if there
    is no change."""
    if change is None:
        return {}
    return {"context": {"reason": change.reason, "keep_turns": change.keep_turns, "resume": change.resume}}
