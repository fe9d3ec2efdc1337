"""Histories as the model's own chat template writes them: how far a prompt agrees with what was sampled, and why not. Pure.

With ``inference.reasoning = template`` every prompt is what the template writes of the whole conversation. As long as that
begins with the history, the segment continues; where the template drops earlier reasoning, or writes a text with other tokens
than those that were sampled, a new segment begins at the first token that differs.
"""

from collections.abc import Sequence

from fleetbus.core.text.reasoning import split_reasoning
from fleetbus_schemas import ChatMessage, SegmentReason


def count_shared(history: Sequence[int], rendered: Sequence[int]) -> int:
    """Number of ids that both begin with."""
    pairs = enumerate(zip(history, rendered, strict=False))
    return next((place for place, (before, after) in pairs if before != after), min(len(history), len(rendered)))


def find_reason(conversation: Sequence[ChatMessage], rendered: str, marks: tuple[str, str] | None) -> SegmentReason:
    """The reason why the prompt ``rendered`` does not begin with what was sampled: it lacks reasoning of an earlier turn, or
    writes something else otherwise."""
    texts = [message.content for message in conversation if message.role == "assistant" and isinstance(message.content, str)]
    thoughts = [split_reasoning(text, marks)[0] for text in texts] if marks is not None else []
    return "reasoning_dropped" if any(thought not in rendered for thought in thoughts) else "history_edited"
