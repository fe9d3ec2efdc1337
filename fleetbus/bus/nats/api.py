"""The JetStream API: JSON questions, JSON answers, and what its error codes mean to fleetbus.

Every question but those of `ask_once` is repeated until it is answered, so ask only what may be asked twice. Above it are the
parts that declare, read and watch; below it the exchange.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from fleetbus.bus.nats.protocol import NO_RESPONDERS, publish_command, status_of
from fleetbus.bus.nats.request_mux import RESEND_SECONDS, Answer, RequestMux
from fleetbus.errors import BusError, LogFull, RequestUnanswered, SequenceConflict

API_TIMEOUT_SECONDS = 30.0
"""How long a question to the server may take, a reconnect included."""

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
STREAM_NAME_IN_USE = 10058
NO_CONSUMERS_LEFT = 10026
CONSUMER_EXISTS = (10013, 10105, 10148)

_WRONG_LAST_SEQUENCE = (10071, 10164)
NO_ROOM = (10077, 10023, 10028, 10047)  # stream, server or account at its limit; no space left
_UNAVAILABLE = (10008, 10118, 10119)  # no leader at the moment, or none of the servers that keep it is up
PASSING = (*_UNAVAILABLE, 10158)  # of a publish, also: the first of two with its id waits for a majority of the servers
_PAUSE_SECONDS = 0.25
_UNKNOWN_TRIES = 3
"""A stream that answered before is waited for when there is no answer; one that never did, for this many tries."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class StreamUnavailable(BusError):
    """No responder for a stream: it does not exist, or the server runs without JetStream."""


class ApiRefused(BusError):
    """The server answered with an error; ``code`` is its JetStream error code."""

    def __init__(self, what: str, code: int, description: str) -> None:
        super().__init__(f"{what}: {description} ({code})")
        self.code = code


def build_publish_error(
    subject: str, expected_last: int | None, code: int, description: str, last: int | None = None
) -> BusError:
    """The error that a refused publish raises; ``last`` is the sequence that it names."""
    if code in _WRONG_LAST_SEQUENCE:
        return SequenceConflict(subject, -1 if expected_last is None else expected_last, last)
    if code in NO_ROOM:
        return LogFull(f"{subject}: {description}")
    return BusError(f"{subject}: the server refused the message: {description} ({code})")


class JetStreamApi:
    """Asks JetStream's subjects, which begin with ``prefix``: see `fleetbus.bus.streams.IMPORTED_API`."""

    def __init__(self, request_mux: RequestMux, prefix: str) -> None:
        self._request_mux = request_mux
        self.prefix = prefix
        self._known: set[str] = set()

    async def ask(self, subject: str, question: Any = None, *, timeout: float = API_TIMEOUT_SECONDS) -> dict[str, Any]:
        """The answer to a subject without the prefix; raises `ApiRefused`, `RequestUnanswered`, `BusError` if JetStream is off.

        A cluster that lost its quorum or is electing a leader counts as one that does not answer.
        """
        give_up_at = anyio.current_time() + timeout
        body = b"" if question is None else _encode(question)
        while True:
            payload, _ = await self._answer(subject, body, give_up_at)
            answer: dict[str, Any] = _decode(payload)
            error = answer.get("error")
            if not error:
                self._known.add(_parse_stream(subject))
                return answer
            code, description = error.get("err_code", 0), error.get("description", "refused")
            if code not in _UNAVAILABLE:
                raise ApiRefused(subject, code, description)
            await _pause(subject, give_up_at, description)

    async def ask_once(self, subject: str, question: Any, *, timeout: float = API_TIMEOUT_SECONDS) -> None:
        """Ask for what must not be done later than now: sent once, and never after the connection was down. Raises
        `RequestUnanswered` if it is down, the server reads nothing, or no answer comes; `ApiRefused`."""
        if not self._request_mux.can_send:
            raise RequestUnanswered(f"{subject} was not asked: the connection is down, or the server reads nothing")
        reply = self._request_mux.new_reply()
        command = publish_command(f"{self.prefix}.{subject}", reply, _encode(question))
        try:
            payload, headers = await self._request_mux.ask(reply, command, timeout=timeout)
        except TimeoutError:
            raise RequestUnanswered(f"the server did not answer {subject} in time") from None
        if status_of(headers) == NO_RESPONDERS:
            raise RequestUnanswered(f"no responders for {subject}")
        if error := _decode(payload).get("error"):
            raise ApiRefused(subject, error.get("err_code", 0), error.get("description", "refused"))

    async def ask_raw(self, subject: str, payload: bytes, *, timeout: float = API_TIMEOUT_SECONDS) -> Answer:
        """As `ask` with bytes on both sides; an answer may be a bare status."""
        answer = await self._answer(subject, payload, anyio.current_time() + timeout)
        self._known.add(_parse_stream(subject))
        return answer

    async def _answer(self, subject: str, payload: bytes, give_up_at: float) -> Answer:
        tries = 0
        while True:
            reply = self._request_mux.new_reply()
            command = publish_command(f"{self.prefix}.{subject}", reply, payload)
            left = give_up_at - anyio.current_time()
            try:
                answer = await self._request_mux.ask(reply, command, timeout=left, resend_seconds=RESEND_SECONDS)
            except TimeoutError:
                raise RequestUnanswered(f"the server did not answer {subject} in time") from None
            if status_of(answer[1]) != NO_RESPONDERS:
                return answer
            tries += 1
            if tries == _UNKNOWN_TRIES and _parse_stream(subject) not in self._known:
                raise StreamUnavailable(f"no responders for {subject}: it does not exist, or the server runs without JetStream")
            await _pause(subject, give_up_at, "no responders")


async def _pause(subject: str, give_up_at: float, reason: str) -> None:
    if anyio.current_time() + _PAUSE_SECONDS >= give_up_at:
        raise RequestUnanswered(f"the server did not answer {subject} in time: {reason}")
    await anyio.sleep(_PAUSE_SECONDS)


def _parse_stream(subject: str) -> str:
    """Questions about a stream name it third: ``STREAM.INFO.<stream>``, ``DIRECT.GET.<stream>.<subject>``."""
    return (*subject.split(".", 3), "", "")[2]
