"""Conversations by the id of the response that they end with, for calls that continue one and send only what is new. Pure.

Nothing is copied: a response is a place in the messages of its segment, which the session holds anyway. After a takeover they
follow from the log, as the ids do. Above it are the session, which looks them up, and `Conversations`, which adds them.
"""

from collections.abc import Sequence
from itertools import count

import msgspec

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, InvalidCall
from fleetbus_workers.environment.adapters.agent.dialects.responses import CALL_PREFIX, MESSAGE_PREFIX

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

    def continues(self, call: AgentCall) -> bool:
        """True if a call names a response here, or an item of one."""
        named = [read_item(name)[0] for names in call.references.values() for name in names]
        return any(response in self._places for response in (call.previous.removeprefix(PREFIX), *named))

    def expand(self, call: AgentCall) -> AgentCall:
        """The call with the items that it only names, and with all messages before it; its own instructions take the place of
        earlier ones. Raises `InvalidCall`."""
        if call.references:
            numbers = count(0)
            said = [
                self._recall(each, call.references.get(next(numbers), ())) if each.role == "assistant" else each
                for each in call.messages
            ]
            call = msgspec.structs.replace(call, messages=tuple(said), references={})
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

    def _recall(self, message: ChatMessage, names: Sequence[str]) -> ChatMessage:
        """The message with the items of answers before what it has itself."""
        texts, calls = [], []
        for name in names:
            response, index = read_item(name)
            place = self._places.get(response)
            answer = None if place is None else self._segments[place[0]][place[1] - 1]
            if answer is None or (index is not None and index >= len(answer.tool_calls)):
                raise InvalidCall(f"input names the item {name!r}, which is of no response of this session")
            if index is None:
                texts.append(str(answer.content))
            else:
                calls.append(answer.tool_calls[index])
        content = "\n".join([*texts, *filter(None, [str(message.content)])])
        return msgspec.structs.replace(message, content=content, tool_calls=(*calls, *message.tool_calls)) if names else message


def read_item(name: str) -> tuple[str, int | None]:
    """The response that an item is of, and which call of it; None for its text."""
    response, _, index = name.removeprefix(CALL_PREFIX).removeprefix(MESSAGE_PREFIX).partition("_")
    return response, int(index) if name.startswith(CALL_PREFIX) and index.isdecimal() else None


def count_system(messages: Sequence[ChatMessage]) -> int:
    """Count the system messages that a conversation begins with."""
    return next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
