"""Control of workers by request: drain, cancel episodes, pause, and the question whether a worker lives and what it holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import structlog

from fleetbus.bus.base import CallBus, Request
from fleetbus_schemas import ControlAnswered, ControlRequested, MalformedMessage, Subjects, WorkerRole, decode, encode

ALL = "all"
"""In the place of a worker's name: every worker of the role."""

log = structlog.get_logger()


class Control:
    """Serves ``fbctl`` for one worker, under its own name and under ``all``. The command stands in the subject, for rights are
    by subject: who may ask whether a worker lives may not end it (docs/decisions/0186-commands-stand-in-their-subjects.md).

    ``cancel`` gets episode ids and who asks, and returns those that it cancelled; ``busy_with`` lists what is in work;
    ``pause`` gets whether to pause, for a worker that can; another one leaves such a question to all to those that can.
    """

    def __init__(
        self,
        bus: CallBus,
        subjects: Subjects,
        *,
        role: WorkerRole,
        worker: str,
        drain: anyio.Event,
        cancel: Callable[[Sequence[str], str], Sequence[str]] = lambda episodes, author: (),
        busy_with: Callable[[], Sequence[str]] = tuple,
        pause: Callable[[bool], None] | None = None,
    ) -> None:
        self._bus = bus
        self._role = role
        self._worker = worker
        self._subjects = (subjects.control(role, worker, "*"), subjects.control(role, ALL, "*"))
        self._drain = drain
        self._cancel = cancel
        self._busy_with = busy_with
        self._pause = pause

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            for subject in self._subjects:
                group.start_soon(self._serve, subject)

    async def _serve(self, subject: str) -> None:
        async with self._bus.serve(subject) as server:
            while True:
                await self._answer(await server.receive())

    async def _answer(self, request: Request) -> None:
        try:
            wanted = decode(ControlRequested, request.payload, subject=request.subject)
        except MalformedMessage as malformed:
            log.warning("control request is malformed; ignoring it", reason=str(malformed))
            return
        if request.subject.rpartition(".")[2] != wanted.command:
            log.warning("control request is not of its subject; ignoring it", command=wanted.command, subject=request.subject)
            return
        is_pause = wanted.command in ("pause", "resume")
        if is_pause and self._pause is None and request.subject.split(".")[3] == ALL:
            return
        busy = tuple(self._busy_with())
        detail = ""
        if wanted.command == "drain":
            self._drain.set()
        elif wanted.command == "cancel":
            detail = ",".join(self._cancel(wanted.episodes, wanted.author))
        elif is_pause and self._pause is not None:
            self._pause(wanted.command == "pause")
        done = {"cancel": bool(detail), "pause": self._pause is not None, "resume": self._pause is not None}
        answer = ControlAnswered(
            worker=self._worker,
            role=self._role,
            done=done.get(wanted.command, True),
            detail=detail,
            busy_with=busy if wanted.command == "ping" else (),
        )
        await request.respond(encode(answer))


async def run_until_drained(drain: anyio.Event, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Run to the end, or until ``drain`` is set."""
    async with anyio.create_task_group() as group:

        async def cancel() -> None:
            await drain.wait()
            group.cancel_scope.cancel()

        group.start_soon(cancel)
        await function(*arguments)
        group.cancel_scope.cancel()
