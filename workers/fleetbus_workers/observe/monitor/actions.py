"""Actions of the page upon a run: cancel, drain, pause, label; by the code of the commands of those names.

A page elsewhere in the same browser cannot reach these: they take JSON alone, which no form can send and no other origin may
send unasked, from the page's own origin, with its key. Each opens a connection of its own, with an operator's rights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, TypeVar

import anyio
import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fleetbus.bus.base import Bus
from fleetbus.delivery.cancel import cancel_episodes, drain_workers, pause_admission
from fleetbus.errors import FleetbusError, iterate_leaves
from fleetbus.log.labels import LabelsRefused, store_labels
from fleetbus_schemas import EpisodeLabeled, Subjects
from fleetbus_schemas.label import MAX_LABELS
from fleetbus_schemas.message import UNREADABLE
from fleetbus_schemas.subjects import InvalidName, check_name
from fleetbus_workers.serving.request_body import BodyRefused, read_body

AUTHOR = "page"
"""Who closes an episode that no worker holds, and who labels one if nobody gives a name."""

MAX_BODY = 64 << 10
MAX_NAMES = 256
SECONDS = 60.0
AT_A_TIME = 4

OpenBus = Callable[[], AbstractAsyncContextManager[Bus]]
Names = Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMES)]
T = TypeVar("T", bound=msgspec.Struct)

log = structlog.get_logger()


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/api/actions/cancel``."""

    episodes: Names


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/api/actions/drain``."""

    workers: Names


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/api/actions/pause``."""

    paused: bool


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/api/actions/label``, with the fields of `EpisodeLabeled`."""

    episode: str
    turn: int | None = None
    add: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_LABELS)] = ()
    remove: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_LABELS)] = ()
    comment: str = ""
    replaces: int = 0
    author: str = ""


class Actions:
    """The routes below ``/api/actions``. ``open_bus`` connects with an operator's rights; ``close_seconds`` is how long a
    worker may take to close an environment."""

    def __init__(self, open_bus: OpenBus, subjects: Subjects, *, close_seconds: float) -> None:
        self._open_bus = open_bus
        self._subjects = subjects
        self._close_seconds = close_seconds
        self._limiter = anyio.CapacityLimiter(AT_A_TIME)

    def build_routes(self) -> list[Route]:
        return [
            Route(f"/api/actions/{name}", handler, methods=["POST"])
            for name, handler in (
                ("cancel", self.cancel),
                ("drain", self.drain),
                ("pause", self.pause),
                ("label", self.label),
            )
        ]

    async def cancel(self, request: Request) -> Response:
        """Cancel episodes and answer with a `CancelResult` for each."""

        async def work(bus: Bus, body: Cancel) -> Any:
            names = [check_name("episode", name) for name in body.episodes]
            return await cancel_episodes(bus, self._subjects, names, author=AUTHOR, close_seconds=self._close_seconds)

        return await self._answer(request, Cancel, work)

    async def drain(self, request: Request) -> Response:
        """The role of each worker, or ``unknown`` or ``unanswered``."""

        async def work(bus: Bus, body: Drain) -> Any:
            return await drain_workers(
                bus, self._subjects, [check_name("worker", name) for name in body.workers], author=AUTHOR
            )

        return await self._answer(request, Drain, work)

    async def pause(self, request: Request) -> Response:
        """The learner that pauses or resumes; null without one."""

        async def work(bus: Bus, body: Pause) -> Any:
            return {"learner": await pause_admission(bus, self._subjects, is_paused=body.paused, author=AUTHOR)}

        return await self._answer(request, Pause, work)

    async def label(self, request: Request) -> Response:
        """Label an episode or comment on it, and answer with all its labels and comments."""

        async def work(bus: Bus, body: Label) -> Any:
            message = EpisodeLabeled(
                episode_id=check_name("episode", body.episode),
                turn=body.turn,
                add=body.add,
                remove=body.remove,
                comment=body.comment.strip(),
                replaces=body.replaces,
                author=body.author.strip() or AUTHOR,
            )
            found = await store_labels(bus, self._subjects, message)
            return {"labels": found.labels, "comments": found.comments}

        return await self._answer(request, Label, work)

    async def _answer(self, request: Request, kind: type[T], work: Callable[[Bus, T], Awaitable[Any]]) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return PlainTextResponse("a body must be of the type application/json", 415)
        try:
            body = msgspec.json.decode(await read_body(request, limit=MAX_BODY), type=kind)
        except BodyRefused as refused:
            return PlainTextResponse(f"not done: {refused}", refused.status)
        except (ClientDisconnect, *UNREADABLE) as error:
            return PlainTextResponse(f"not done: {error}", 400)
        asked = {name: value for name, value in msgspec.structs.asdict(body).items() if name != "comment"}
        log.info("acting for the page", action=request.url.path.rpartition("/")[2], asked=asked)
        try:
            with anyio.fail_after(SECONDS):
                async with self._limiter, self._open_bus() as bus:
                    done = await work(bus, body)
        except Exception as error:  # a group, out of the connection's tasks
            cause = next(iterate_leaves(error))
            if isinstance(cause, (InvalidName, LabelsRefused)):
                return PlainTextResponse(f"not done: {cause}", 400)
            if isinstance(cause, TimeoutError):
                return PlainTextResponse(f"no answer within {SECONDS:g} s: look again before you repeat it", 503)
            if isinstance(cause, FleetbusError):
                return PlainTextResponse(f"not done: {cause}", 503)
            raise
        return Response(msgspec.json.encode(done), media_type="application/json")
