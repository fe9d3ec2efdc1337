"""Translates the methods of the remote-gym protocol into calls to a session on the bus.

A client of this protocol repeats all that is not answered with 200, so only what is worth repeating gets another status: an
environment that failed ends the episode with ``done`` and says in ``info`` that it must not be trained on.
"""

import hashlib
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio
import msgspec

from fleetbus.bus.objects import ObjectMissing
from fleetbus.client.contexts import describe_context
from fleetbus.client.sessions import SessionClient
from fleetbus.core.episode.journal import Journal
from fleetbus.log.actions import LAG_PAUSES_SECONDS
from fleetbus_schemas import MalformedMessage, SessionAnswer, SessionCall, Task
from fleetbus_schemas.names import is_name
from fleetbus_schemas.session import SessionCallKind
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.gateway.gym_wire import Request
from fleetbus_workers.gateway.image_format import ImageFormat
from fleetbus_workers.gateway.images import PNG, LoadImage, render_messages

METHODS = ("system_prompt", "reset", "step", "close")
FAILED = "Environment Error"
FAILURES = frozenset({"env_failed", "timeout", "lost"})
"""Ends after which the client's session continues with its next reset, in an environment of its own."""


class CallRefused(Exception):
    """An answer that is not 200; the text is its ``detail``."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class SessionInfo(msgspec.Struct):
    """A session as this gateway saw it. ``busy``: calls in work; ``is_open``: there is a session. Clients get Unix
    seconds; ``used_at`` is monotonic, for a clock that is set must end nothing."""

    created_at: float
    last_access: float
    used_at: float
    busy: int = 0
    is_open: bool = False


class Answer(NamedTuple):
    """The answer to the client; images are in the order of their places in ``obs``."""

    fields: dict[str, Any]
    images: Sequence[bytes] = ()


def build_task(config: dict[str, object]) -> Task:
    """A task made of the configuration itself: the environment reads it from ``task.config``."""
    return Task(
        key=str(config.get("task_key", config.get("key", "gym"))),
        env=str(config.get("env_key", "")),
        prompt=str(config.get("prompt", "")),
        config=config,
    )


class GymCalls:
    """Methods to answers, for all sessions that come through one gateway."""

    def __init__(
        self,
        client: SessionClient,
        *,
        call_seconds: float,
        max_sessions: int = 0,
        load: LoadImage | None = None,
        images: ImageFormat = PNG,
    ) -> None:
        self._client = client
        self._call_seconds = call_seconds
        self._max_sessions = max_sessions
        self._load = load
        self._format = images
        self.sessions: dict[str, SessionInfo] = {}
        self._failed_journals: dict[str, list[dict[str, SessionAnswer]]] = {}
        self._failed_used_at: dict[str, float] = {}
        """When the sessions that had a failed environment were used last, as in `SessionInfo`."""
        self._numbers: dict[str, int] = {}
        """Of open sessions, by their name on the bus, the newest call that this gateway was answered."""

    @property
    def mime(self) -> str:
        """The type of images in answers."""
        return self._format.mime

    async def connect(self, request: Request) -> Answer:
        """A separate session per call; its name comes from the call's key, so a repetition finds the same one."""
        config = request.fields.get("env_config") or {}
        if not isinstance(config, dict):
            raise CallRefused(400, "env_config must be an object")
        seed = _parse_seed(request.fields.get("seed"))
        session = request.key
        if self._max_sessions and session not in self.sessions and len(self.sessions) >= self._max_sessions:
            raise CallRefused(503, f"Max sessions limit reached ({self._max_sessions}). Try again later or close sessions.")
        try:
            task = msgspec.structs.replace(build_task(config), seed=seed)
        except ValueError as error:
            raise CallRefused(400, str(error)) from error
        with self._mark_in_use(session):
            opened = await self._execute(session, "open", request.key, task=task)
            if opened.end is not None or seed is None:
                return Answer({"session_id": session} | (_build_failure(opened) if opened.end is not None else {}))
            answer = await _handle_missing_images(self._reset(session, f"{request.key}r", seed))
            return Answer({"session_id": session} | answer.fields, answer.images)

    async def call(self, request: Request) -> Answer:
        """One method of a session."""
        session, method = request.fields.get("session_id"), request.fields.get("method")
        if not session or not isinstance(session, str):
            raise CallRefused(400, "session_id required")
        if not method:
            raise CallRefused(400, "method required")
        if not is_name(session):
            raise CallRefused(404, f"Session {session} not found")
        if method not in METHODS:
            raise CallRefused(400, f"method {method!r} is none of: {', '.join(METHODS)}")
        parameters = request.fields.get("params") or {}
        if not isinstance(parameters, dict):
            raise CallRefused(400, "params must be an object")
        with self._mark_in_use(session):
            return await _handle_missing_images(self._dispatch(session, str(method), request.key, parameters))

    async def expire(self, session: str) -> None:
        """Close a session that was not used for too long."""
        self.sessions.pop(session, None)
        call = SessionCall(session=self._name(session), call="close", key="expired")
        self._forget(session)
        await self._client.call(call, timeout=self._call_seconds)

    def forget_failed(self, oldest: float) -> None:
        """Forget the failed environments of sessions that are over and were not used since: the log tells them to a call that
        comes after all."""
        for session in [each for each, used_at in self._failed_used_at.items() if used_at < oldest]:
            del self._failed_used_at[session]
            if session not in self.sessions:
                self._forget(session)

    def _forget(self, session: str) -> None:
        self._numbers.pop(self._name(session), None)
        self._failed_journals.pop(session, None)

    async def _dispatch(self, session: str, method: str, key: str, parameters: dict[str, object]) -> Answer:
        if method == "system_prompt":
            return await self._system_prompt(session)
        if method == "reset":
            return await self._reset(session, key, _parse_seed(parameters.get("seed", 0)))
        if method == "close":
            await self._execute(session, "close", key)
            self._forget(session)
            return Answer({"closed": True})
        return await self._step(session, key, str(parameters.get("action_str", "")))

    async def _reset(self, session: str, key: str, seed: int | None) -> Answer:
        answer = await self._execute(session, "reset", key, seed=seed)
        if answer.end in FAILURES and answer.refusal:
            answer = await self._reset_in_new_environment(session, answer.session, key, seed)
        if answer.end is not None:
            return Answer(_build_failure(answer))
        text, images = await render_messages(
            [each for each in answer.messages if each.role != "system"], self._load, self._format
        )
        return Answer({"obs": text, "info": answer.state}, images)

    async def _step(self, session: str, key: str, action: str) -> Answer:
        answer = await self._execute(session, "step", key, text=action)
        if answer.refusal == "conflict":
            answer = await self._repeat_last_answer(session, answer)
            return await self._build_step_answer(answer, reward=0.0, info=_info(answer))
        if answer.end is not None:
            return Answer(_build_failure(answer) | {"reward": 0.0, "done": True})
        reward, info = answer.reward or 0.0, _info(answer)
        if answer.terminated or answer.truncated:
            reward += await self._unpaid(session, key, info)
        return await self._build_step_answer(answer, reward=reward, info=info)

    async def _build_step_answer(self, answer: SessionAnswer, *, reward: float, info: dict[str, object]) -> Answer:
        text, images = await render_messages(answer.messages, self._load, self._format)
        return Answer({"obs": text, "reward": reward, "done": answer.terminated or answer.truncated, "info": info}, images)

    async def _repeat_last_answer(self, session: str, refused: SessionAnswer) -> SessionAnswer:
        """The last answer of an episode that is over: a step after it shows the end again, and nothing is executed. The
        protocol's clients repeat what is refused for minutes. Raises `CallRefused` for any other conflict."""
        records = [each for each in (await self._journal(session)).records if each.call.call in ("reset", "step")]
        last = records[-1].answer if records else None
        if last is None or not (last.terminated or last.truncated):
            raise CallRefused(400, refused.error)
        return last

    async def _reset_in_new_environment(self, session: str, failed: str, key: str, seed: int | None) -> SessionAnswer:
        """The reset of a session whose environment failed: in an environment of its own, under the next name on the bus."""
        journal = await self._journal(session)
        if journal.claim is None:  # it failed so long ago that it has left the log
            self.sessions.pop(session, None)
            raise CallRefused(404, f"Session {session} not found")
        self._leave_failed(session, failed, journal)
        opened = await self._execute(session, "open", f"{key}o", task=journal.claim.task)
        return opened if opened.end is not None else await self._execute(session, "reset", key, seed=seed)

    async def _unpaid(self, session: str, key: str, info: dict[str, object]) -> float:
        """The part of the verdict that the steps were not rewarded."""
        answer = await self._execute(session, "verify", f"{key}v")
        if answer.end is not None or answer.reward is None or answer.unpaid is None:
            info |= {"training_usable": False, "error": answer.error or answer.reason or "no verdict"}
            return 0.0
        if answer.unpaid == answer.reward:  # a reward for a step says nothing of success
            info.setdefault("success", answer.reward > 0)
        return answer.unpaid

    async def _system_prompt(self, session: str) -> Answer:
        journal = await self._journal(session)
        for record in reversed(journal.records):
            if record.call.call == "reset":
                prompt = [message for message in record.answer.messages if message.role == "system"]
                text, images = await render_messages(prompt, self._load, self._format)
                return Answer({"obs": text}, images)
        if journal.claim is None:
            raise CallRefused(404, f"Session {session} not found")
        raise CallRefused(400, "reset comes before system_prompt")

    async def _journal(self, session: str) -> Journal:
        """As the log has it by now: a replica that is behind does not know yet what this gateway, or another, was answered."""
        name = self._name(session)
        for pause in (*LAG_PAUSES_SECONDS, 0.0):
            journal = await read_session_journal(self._client.bus, self._client.subjects, name)
            if journal.claim is not None and journal.next_number > self._numbers.get(name, 0):
                break
            await anyio.sleep(pause)
        return journal

    def _name(self, session: str) -> str:
        """The name of the session on the bus: with each environment of it that failed and was followed by another, a new
        name."""
        failed = len(self._failed_journals.get(session, ()))
        return _name_follower(session, failed) if failed else session

    async def _execute(self, session: str, kind: SessionCallKind, key: str, **fields: Any) -> SessionAnswer:
        """An answer that was executed, now or before, the end of a failed environment, or a conflict; raises `CallRefused`
        else."""
        for answers in self._failed_journals.get(session, ()):
            if key in answers:  # a late repetition of what a failed environment answered
                return answers[key]
        call = SessionCall(session=self._name(session), call=kind, key=key, **fields)
        try:
            answer = await self._client.call(call, timeout=self._call_seconds)
        except MalformedMessage as malformed:
            raise CallRefused(400, f"the call cannot be encoded: {malformed.reason}") from malformed
        if answer.end in FAILURES and (answer.refusal or kind == "close") and await self._is_followed(session):
            return await self._execute(session, kind, key, **fields)
        if answer.refusal in ("unknown", "closed") or answer.end is not None:
            self.sessions.pop(session, None)
        if answer.refusal in ("unknown", "closed"):
            if answer.end in FAILURES:
                return answer
            self._forget(session)
            if kind == "open" and answer.end is None:  # it took longer than settled entries stay in the log
                raise CallRefused(409, answer.error)
            raise CallRefused(404, f"Session {session} not found")
        if answer.refusal and not (answer.refusal == "conflict" and kind == "step"):
            raise CallRefused(400, answer.error)
        if answer.end is not None:
            self._numbers.pop(call.session, None)
        elif not answer.refusal:
            self._numbers[call.session] = max(answer.number, self._numbers.get(call.session, 0))
        if answer.end is None and (session_info := self.sessions.get(session)):
            session_info.is_open = True
        return answer

    async def _is_followed(self, session: str) -> bool:
        """True if another gateway continued this session after its environment had failed; then so does this one."""
        following = _name_follower(session, len(self._failed_journals.get(session, ())) + 1)
        if await self._client.bus.last(self._client.subjects.session(following)) is None:
            return False
        failed = self._name(session)
        self._leave_failed(session, failed, await self._journal(session))
        return True

    def _leave_failed(self, session: str, failed: str, journal: Journal) -> None:
        """The session has its next name from now on, unless a repetition of the same call gave it that meanwhile."""
        if self._name(session) == failed:
            self._numbers.pop(failed, None)
            self._failed_journals.setdefault(session, []).append({record.call.key: record.answer for record in journal.records})

    @contextmanager
    def _mark_in_use(self, session: str) -> Iterator[None]:
        """A session with a call in work. One of which nothing was ever heard holds no place afterwards."""
        now, used_at = time.time(), time.monotonic()
        session_info = self.sessions.setdefault(session, SessionInfo(created_at=now, last_access=now, used_at=used_at))
        session_info.last_access, session_info.used_at = now, used_at
        session_info.busy += 1
        try:
            yield
        finally:
            session_info.busy -= 1
            session_info.last_access, session_info.used_at = time.time(), time.monotonic()
            if not session_info.busy and not session_info.is_open:
                self.sessions.pop(session, None)
            if session in self._failed_journals or (session not in self.sessions and self._name(session) in self._numbers):
                self._failed_used_at[session] = session_info.used_at


async def _handle_missing_images(answer: Awaitable[Answer]) -> Answer:
    """An answer, or the end of an episode whose images are gone: asked again, they would be gone again."""
    try:
        return await answer
    except ObjectMissing as gone:
        info = {"training_usable": False, "error_class": "image_gone", "error": str(gone)}
        return Answer({"obs": FAILED, "info": info, "reward": 0.0, "done": True})


def _info(answer: SessionAnswer) -> dict[str, object]:
    ended = {"terminated": answer.terminated, "truncated": answer.truncated}
    return answer.state | ended | describe_context(answer.context)


def _build_failure(answer: SessionAnswer) -> dict[str, object]:
    """An environment's failure as an end of the episode that clients do not retry and do not train on."""
    info = {"training_usable": False, "outcome": answer.end, "error_class": answer.error_class, "error": answer.error}
    return {"obs": FAILED, "info": info}


def _name_follower(session: str, failed: int) -> str:
    """The name on the bus of a session of which so many environments failed; of a name that leaves no room, its hash."""
    name = f"{session}-{failed}"
    return name if is_name(name) else f"{hashlib.sha256(session.encode()).hexdigest()}-{failed}"


def _parse_seed(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise CallRefused(400, "seed must be an integer")
