"""Conversations by the id of the response that they end with, for calls that continue one and send only what is new. Pure.

Nothing is copied: a response is a place in the messages of its segment, which the session holds anyway. After a takeover they
follow from the log, as the ids do. Above it are the session, which looks them up, and `Conversations`, which adds them.
"""

from collections.abc import Sequence

import msgspec

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, InvalidCall

PREFIX = "resp_"
NOT_FOUND = "previous_response_not_found"
"""The code by which clients know that they have to send everything."""


class StoredResponses:
    """The responses of one session."""

    def __init__(self) -> None:
        self._segments: dict[int, list[ChatMessage]] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def add_messages(self, segment: int, messages: Sequence[ChatMessage]) -> None:
        """Add the messages that a call added to its segment."""
        self._segments.setdefault(segment, []).extend(messages)

    def add_answer(self, segment: int, response: str, answer: ChatMessage) -> None:
        """Add the answer to it; ``response`` is its id without a protocol's prefix."""
        self.add_messages(segment, (answer,))
        self._places[response] = (segment, len(self._segments[segment]))

    def has(self, previous: str) -> bool:
        """True if the id that a call gives as ``previous`` is of a response here."""
        return previous.removeprefix(PREFIX) in self._places

    def expand(self, call: AgentCall) -> AgentCall:
        """The call with all messages before it; its own instructions take the place of earlier ones. Raises `InvalidCall`."""
        if not call.previous:
            return call
        place = self._places.get(call.previous.removeprefix(PREFIX))
        if place is None:
            raise InvalidCall(f"previous_response_id {call.previous!r} is no response of this session", code=NOT_FOUND)
        segment, length = place
        before, new = self._segments[segment][:length], list(call.messages)
        head = count_system(new)
        if head and (old := count_system(before)):
            before[:old], new = new[:head], new[head:]
        return msgspec.structs.replace(call, messages=(*before, *new), previous="")


def count_system(messages: Sequence[ChatMessage]) -> int:
    """Count the system messages that a conversation begins with."""
    return next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
