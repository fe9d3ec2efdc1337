"""Estimates the tokens of messages before anything has tokenised them: from what earlier ones became. Pure.

Short messages are mostly what a chat template writes around them, so that they say nothing about long ones, nor do images
about text: each kind is estimated by the most tokens that one of its own kind became.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetbus_schemas import Action, ChatMessage, Text
from fleetbus_schemas.tokens import count_tokens

SHORT_CHARACTERS = 200


class TokenEstimate:
    """Tokens per character of short and of long messages, and per image; of a kind that was never seen, the other's."""

    __slots__ = ("_image", "_long", "_short")

    def __init__(self) -> None:
        self._short = 0.0
        self._long = 0.0
        self._image = 0.0

    def learn(self, messages: Sequence[ChatMessage], action: Action) -> None:
        """``action`` answered ``messages``."""
        repeated = action.origin.repeated if action.origin is not None else 0
        shown = [image.stop - image.start for image in action.images if image.start >= repeated]
        self._image = max(self._image, *shown, 0)
        characters = max(count_characters(messages), 1)
        rate = (count_tokens(action.prompt_delta) - repeated - sum(shown)) / characters
        if characters <= SHORT_CHARACTERS:
            self._short = max(self._short, rate)
        else:
            self._long = max(self._long, rate)

    def estimate(self, messages: Sequence[ChatMessage]) -> float:
        """The tokens of messages to come."""
        characters = count_characters(messages)
        rate = self._short or self._long if characters <= SHORT_CHARACTERS else self._long or self._short
        return rate * characters + self._image * sum(len(message.images) for message in messages)


def count_characters(messages: Sequence[ChatMessage]) -> int:
    """Of the text of the messages."""
    return sum(
        len(message.content)
        if isinstance(message.content, str)
        else sum(len(part.text) for part in message.content if isinstance(part, Text))
        for message in messages
    )
