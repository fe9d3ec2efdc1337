"""The routes of the page: its files, live events, episodes, groups, one episode. They read the fold and the log.

Everything is JSON or a file of the package; texts of policies and tasks are data here and text nodes in the page, never markup.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleetbus.errors import BusError, UserError
from fleetbus.recording.episodes import build_episode_subjects
from fleetbus.recording.text_index import Found
from fleetbus_schemas import Subjects
from fleetbus_schemas.subjects import InvalidName, check_name
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.monitor.access_key import AccessKey
from fleetbus_workers.observe.monitor.actions import Actions
from fleetbus_workers.observe.monitor.compared_evaluations import Compared, ComparedEvaluations
from fleetbus_workers.observe.monitor.diagnosed_run import Diagnosed, DiagnosedRun
from fleetbus_workers.observe.monitor.episode_table import build_csv, choose_rows
from fleetbus_workers.observe.monitor.images import ObservedImages
from fleetbus_workers.observe.monitor.other_runs import list_other_runs, read_other_run
from fleetbus_workers.observe.monitor.reward_histogram import build_reward_histogram
from fleetbus_workers.observe.monitor.shown_run import (
    EVERYTHING,
    count_points,
    describe_curves,
    describe_overview,
    describe_row,
    describe_whole_episode,
)
from fleetbus_workers.observe.monitor.success_table import build_success_table
from fleetbus_workers.observe.monitor.text_search import TextSearch
from fleetbus_workers.observe.monitor.token_decoder import TokenDecoder
from fleetbus_workers.observe.monitor.trainer_tokens import TrainerTokens
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.watchdog import find_notes, find_stalls
from fleetbus_workers.serving.browser_guard import BrowserGuard, GuardSettings

PAGE = Path(__file__).parent / "page"
TICK_SECONDS = 0.5
PAGE_ROWS = 100
MAX_ROWS = 1000
READ_SECONDS = 20.0
REJOIN_SECONDS = 15.0

NOT_SERVED = "the run has ended and its log is no longer served: start `fleetbus monitor` again to read it from its files"

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Site:
    """One watched run as a web application; ``runs`` is the folder of this machine's runs; ``key`` is asked for unless empty
    (see `AccessKey`). ``actions`` are what the page may do to the run, behind a key alone; ``rejoins``: a log that is
    no longer served will be soon. Set ``stopping`` to end the streams of events."""

    def __init__(
        self,
        watch: RunObserver,
        subjects: Subjects,
        words: TokenDecoder,
        search: TextSearch,
        images: ObservedImages,
        trainer: TrainerTokens,
        diagnosed: DiagnosedRun,
        compared: ComparedEvaluations,
        *,
        guard: GuardSettings,
        admission: float,
        success_threshold: float,
        runs: Path,
        key: str = "",
        actions: Actions | None = None,
        rejoins: bool = False,
    ) -> None:
        self._rejoins = rejoins
        self._has_actions = bool(actions and key)
        self._runs = runs
        self._watch = watch
        self._subjects = subjects
        self._words = words
        self._search = search
        self._trainer = trainer
        self._diagnosed = diagnosed
        self._compared = compared
        self._admission = admission
        self._success_threshold = success_threshold
        self._overview: tuple[float, bytes] = (-1.0, b"")
        self.stopping = anyio.Event()
        middleware = [Middleware(_SecurityHeaders), Middleware(BrowserGuard, settings=guard)]
        if key:
            middleware.append(Middleware(AccessKey, key=key))
        self.app = Starlette(
            routes=[
                Route("/", self.page),
                Route("/api/events", self.events),
                Route("/api/overview", self.overview),
                Route("/api/curves", self.curves),
                Route("/api/diagnosis", self.diagnosis),
                Route("/api/comparison", self.comparison),
                Route("/api/episodes", self.episodes),
                Route("/api/episodes/{episode}", self.episode),
                Route("/api/images/{object}", images.image),
                Route("/api/groups", self.groups),
                Route("/api/success", self.success),
                Route("/api/rewards", self.rewards),
                Route("/api/runs", self.other_runs),
                Route("/api/runs/{run}", self.other_run),
                Mount("/page", StaticFiles(directory=PAGE)),
                *(actions.build_routes() if actions and key else ()),
            ],
            middleware=middleware,
        )

    async def page(self, _request: Request) -> Response:
        return Response(await anyio.Path(PAGE / "index.html").read_bytes(), media_type="text/html")

    # Live

    async def events(self, _request: Request) -> Response:
        return StreamingResponse(self._stream_events(), media_type="text/event-stream")

    async def _stream_events(self) -> AsyncIterator[bytes]:
        """``overview`` twice a second at most, only when it differs; ``curves`` when there are new points."""
        drawn: Mapping[str, int] = {}
        evaluations, history = -1, -1
        last = b""
        while not self.stopping.is_set():
            state = self._watch.state
            now = (count_points(state), len(state.training.evaluations), state.history)
            if now != (drawn, evaluations, history):
                yield _encode_event("curves", self._encode_curves(drawn if history == state.history else EVERYTHING))
                drawn, evaluations, history = now
            overview = self._encode_overview()
            if overview != last:
                yield _encode_event("overview", overview)
                last = overview
            with anyio.move_on_after(TICK_SECONDS):
                await self.stopping.wait()

    async def overview(self, _request: Request) -> Response:
        return _build_json_response(self._encode_overview())

    def _encode_overview(self) -> bytes:
        """Cached: the same bytes for all requests within a tick."""
        now = anyio.current_time()
        if now - self._overview[0] >= TICK_SECONDS / 2:
            state, health, bus = self._watch.state, self._watch.health, self._watch.bus
            ending = self._watch.find_termination(now)
            view = RunView(state, health, self._watch.server, now=now, now_ns=bus.now_ns(), termination=ending)
            is_behind = self._watch.is_behind(now)
            facts = describe_overview(view, run=self._subjects.run, is_behind=is_behind, has_actions=self._has_actions)
            facts["stalls"] = self._find_stalls(now, bus.now_ns())
            facts["notes"] = [] if ending or is_behind else find_notes(state, now_ns=bus.now_ns())
            self._overview = (now, msgspec.json.encode(facts))
        return self._overview[1]

    def _find_stalls(self, now: float, now_ns: int) -> list[dict[str, Any]]:
        if not self._watch.may_be_stuck(now):
            return []
        found = find_stalls(self._watch.state, self._watch.health, now=now, now_ns=now_ns, admission=self._admission)
        return [msgspec.structs.asdict(stall) | {"line": stall.line} for stall in found]

    async def curves(self, _request: Request) -> Response:
        return _build_json_response(self._encode_curves(EVERYTHING))

    def _encode_curves(self, starts: Mapping[str, int]) -> bytes:
        """Points of each policy from the number in ``starts`` on."""
        return msgspec.json.encode(describe_curves(self._watch.state, starts))

    async def rewards(self, _request: Request) -> Response:
        """Rewards by step, of the episodes that are remembered."""
        state = self._watch.state
        return _build_json_response(msgspec.json.encode(build_reward_histogram(state.episodes.rows.values(), state.trained_in)))

    async def other_runs(self, _request: Request) -> Response:
        """Names of the runs whose curves can be drawn beside."""
        names = await anyio.to_thread.run_sync(list_other_runs, self._runs, self._subjects.run)
        return _build_json_response(msgspec.json.encode(names))

    async def other_run(self, request: Request) -> Response:
        try:
            run = check_name("run", request.path_params["run"])
        except InvalidName as error:
            return PlainTextResponse(str(error), 400)
        found = await anyio.to_thread.run_sync(read_other_run, self._runs, run)
        if found is None:
            return PlainTextResponse(f"run {run} has no summary that can be read", 404)
        return _build_json_response(msgspec.json.encode(found))

    # Tables

    async def episodes(self, request: Request) -> Response:
        """Query: see `choose_rows`; ``said``: words that are in one turn, as `TextSearch` has them; ``offset``, ``limit``; with
        ``format=csv`` all that match, as a file."""
        query = request.query_params
        state = self._watch.state
        chosen = choose_rows(state.episodes.rows.values(), state.describe_state, query)
        said, about = query.get("said", ""), dict[str, Any]()
        found: Mapping[str, Found] = {}
        offset, limit = _parse_page(query)
        try:
            if said:
                matching = await self._search.find_episodes(said)
                chosen = [row for row in chosen if row.episode_id in matching]
                found = await self._search.describe(said, [row.episode_id for row in chosen[offset : offset + limit]])
                about = {"indexed": await self._search.compute_share(self._watch.health.last_sequence)}
                about["problem"] = self._search.problem
        except UserError as error:
            return PlainTextResponse(str(error), 400)
        except sqlite3.Error as error:
            return PlainTextResponse(f"the text index cannot be used: {error}: try again", 503)
        if query.get("format") == "csv":
            headers = {"content-disposition": f'attachment; filename="{self._subjects.run}-episodes.csv"'}
            return PlainTextResponse(build_csv(chosen, state.describe_state), headers=headers, media_type="text/csv")
        rows = chosen[offset : offset + limit]
        shown = [describe_row(state, row) | {"found": found.get(row.episode_id)} for row in rows]
        return _build_json_response(msgspec.json.encode({"total": len(chosen), "offset": offset, "rows": shown, **about}))

    async def groups(self, request: Request) -> Response:
        """Newest first. Query: ``offset``, ``limit``, ``flat`` (only groups whose rewards are all equal)."""
        query = request.query_params
        groups = self._watch.state.groups()[::-1]
        if query.get("flat"):
            groups = [group for group in groups if group.spread == 0 and not group.open]
        return _build_page(groups, query)

    async def success(self, request: Request) -> Response:
        """Query: see `build_success_table`; ``offset``, ``limit``."""
        query = request.query_params
        rows = build_success_table(self._watch.state.episodes.rows.values(), query, threshold=self._success_threshold)
        return _build_page(rows, query)

    async def diagnosis(self, request: Request) -> Response:
        """The findings of `fleetbus diagnose`, as of some seconds ago."""
        try:
            found = Diagnosed(problem=NOT_SERVED) if await self._is_closed() else await self._diagnosed.get()
        except BusError as error:
            found = Diagnosed(problem=str(error))
        return _build_json_response(msgspec.json.encode(found))

    async def comparison(self, request: Request) -> Response:
        """Query: see `ComparedEvaluations`; ``offset``, ``limit``."""
        query = request.query_params
        offset, limit = _parse_page(query)
        if await self._is_closed():
            found = Compared(run=self._subjects.run, others=[], problem=NOT_SERVED)
        else:
            found = await self._compared.get(query, offset=offset, limit=limit)
        return _build_json_response(msgspec.json.encode(found))

    # One episode

    async def episode(self, request: Request) -> Response:
        try:
            episode = check_name("episode", request.path_params["episode"])
        except InvalidName as error:
            return PlainTextResponse(str(error), 400)
        if await self._is_closed():
            return PlainTextResponse(NOT_SERVED, 503)
        entries = []
        try:
            with anyio.fail_after(READ_SECONDS):
                async for entry in self._watch.bus.scan(build_episode_subjects(self._subjects, episode)):
                    entries.append(entry)  # noqa: PERF401  # what was read before a time limit is not shown in part
                trained = await self._trainer.find(episode)
        except TimeoutError:
            return PlainTextResponse(f"the log was not read within {READ_SECONDS:g} s", 503)
        if not entries:
            return PlainTextResponse(f"the log has no episode {episode}", 404)
        facts = describe_whole_episode(self._watch.state, episode, entries, self._words, trained)
        facts["actions"] = self._has_actions
        return _build_json_response(msgspec.json.encode(facts, enc_hook=repr))  # MessagePack has values that JSON has not

    async def _is_closed(self) -> bool:
        """True if nobody serves the log of a run that has ended; waits where its files are about to be served again."""
        with anyio.move_on_after(REJOIN_SECONDS if self._rejoins else 0):
            while self._is_log_gone():  # noqa: ASYNC110  # the observer looks again by itself and notifies nobody
                await anyio.sleep(TICK_SECONDS)
        return self._is_log_gone()

    def _is_log_gone(self) -> bool:
        return bool(self._watch.health.problem) and self._watch.find_termination(anyio.current_time()) is not None


class _SecurityHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self._app(scope, receive, with_headers)


def _parse_number(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 10 else otherwise


def _parse_page(query: Mapping[str, str]) -> tuple[int, int]:
    """Offset and limit of the rows that are asked for."""
    return _parse_number(query.get("offset"), 0), min(_parse_number(query.get("limit"), PAGE_ROWS), MAX_ROWS)


def _build_json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _build_page(rows: Sequence[Any], query: Mapping[str, str]) -> Response:
    offset, limit = _parse_page(query)
    shown = {"total": len(rows), "offset": offset, "rows": rows[offset : offset + limit]}
    return _build_json_response(msgspec.json.encode(shown))


def _encode_event(name: str, content: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), content)
