"""Histories as the model's own chat template writes them: how far a prompt agrees with what was sampled, and why not. Pure.

With ``inference.reasoning = template`` every prompt is what the template writes of the whole conversation. As long as that
begins with the history, the segment continues; where the template drops earlier reasoning, or writes a text with other tokens
than those that were sampled, a new segment begins at the first token that differs.
"""

from collections.abc import Sequence

import msgspec

from fleetbus.core.text.reasoning import split_reasoning
from fleetbus_schemas import NEW_ROOT, ChatMessage, Observation, SegmentOrigin, SegmentReason
from fleetbus_workers.inference.base import RequestRefused, Template
from fleetbus_workers.inference.history_cache import History


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


def render_conversation(
    template: Template, observation: Observation, history: History, conversation: Sequence[ChatMessage]
) -> tuple[Observation, list[int]]:
    """The whole prompt as the template writes it; where it is not the history and more, a segment of this worker's own begins
    with it. Raises `RequestRefused`."""
    if observation.origin is not None and observation.origin.reason != "seat":
        raise RequestRefused("inference.reasoning = template renders the whole conversation, and a part of it was dropped")
    if any(message.images for message in conversation):
        raise RequestRefused("inference.reasoning = template renders text only, and the episode contains images")
    rendered = template.encode_conversation(conversation, history.tools)
    kept = count_shared(history.ids, rendered)
    if kept == len(history.ids):
        return observation, rendered
    reason = template.explain_rendering(conversation, rendered)
    origin = SegmentOrigin(parent=observation.segment if kept else NEW_ROOT, kept=kept, reason=reason)
    return msgspec.structs.replace(observation, segment=observation.segments, origin=origin), rendered
