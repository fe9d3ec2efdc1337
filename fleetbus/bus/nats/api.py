"""The JetStream API: JSON questions, JSON answers, and what its error codes mean to fleetbus.

Every question is repeated until it is answered, so ask only what may be asked twice. Above it are the parts that declare,
read and watch; below it the exchange.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from fleetbus.bus.nats.exchange import RESEND_SECONDS, Answer, Exchanges
from fleetbus.bus.nats.protocol import NO_RESPONDERS, publish_command, status_of
from fleetbus.errors import BusError, LogFull, RequestUnanswered, SequenceConflict

API_TIMEOUT_SECONDS = 30.0
"""How long a question to the server may take, a reconnect included."""

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
STREAM_NAME_IN_USE = 10058
CONSUMER_EXISTS = (10013, 10105, 10148)

_WRONG_LAST_SEQUENCE = (10071, 10164)
_NO_ROOM = (10077, 10023, 10028, 10047)  # stream, server or account at its limit; no space left
_RETRIES_SECONDS = (0.25, 0.25)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class ApiRefused(BusError):
    """The server answered with an error; ``code`` is its JetStream error code."""

    def __init__(self, what: str, code: int, description: str) -> None:
        super().__init__(f"{what}: {description} ({code})")
        self.code = code


def refusal_of_publish(subject: str, expected_last: int | None, code: int, description: str) -> BusError:
    """The error that a refused publish raises."""
    if code in _WRONG_LAST_SEQUENCE:
        return SequenceConflict(subject, -1 if expected_last is None else expected_last)
    if code in _NO_ROOM:
        return LogFull(f"{subject}: {description}")
    return BusError(f"{subject}: the server refused the message: {description} ({code})")


class JetStreamApi:
    """Asks the ``$JS.API`` subjects of the server."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    async def ask(self, subject: str, question: Any = None, *, timeout: float = API_TIMEOUT_SECONDS) -> dict[str, Any]:
        """The answer to ``$JS.API.<subject>``; raises `ApiRefused`, `RequestUnanswered`, or `BusError` if JetStream is off."""
        payload, _ = await self.ask_raw(subject, b"" if question is None else _encode(question), timeout=timeout)
        answer: dict[str, Any] = _decode(payload)
        error = answer.get("error")
        if error:
            raise ApiRefused(subject, error.get("err_code", 0), error.get("description", "refused"))
        return answer

    async def ask_raw(self, subject: str, payload: bytes, *, timeout: float = API_TIMEOUT_SECONDS) -> Answer:
        """As `ask` with bytes on both sides; an answer may be a bare status."""
        for pause in (*_RETRIES_SECONDS, None):
            reply = self._exchanges.new_reply()
            command = publish_command(f"$JS.API.{subject}", reply, payload)
            try:
                answer = await self._exchanges.ask(reply, command, timeout=timeout, resend_seconds=RESEND_SECONDS)
            except TimeoutError:
                raise RequestUnanswered(f"the server did not answer {subject} within {timeout:g} s") from None
            if status_of(answer[1]) != NO_RESPONDERS:
                return answer
            if pause is not None:
                await anyio.sleep(pause)
        raise BusError(f"nobody answers {subject}: it does not exist, or the server runs without JetStream")
