"""A small server of the Open Reward Standard in this process, with the tasks of the real one in `tests/foreign`.

``faults`` are what the next calls run into, one each: see `OrsDouble._call`.
"""

from __future__ import annotations

import json
import runpy
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.http_server import LocalServer, serve_application
from tests.support.ors_process import SCRIPT

REAL = runpy.run_path(str(SCRIPT), run_name="real")
SPLITS = {"train": (0, 50), "test": (1000, 10), "trouble": (0, 8)}
TOOLS = [
    {
        "name": "compare",
        "description": "Say which of two words comes first.",
        "input_schema": {"required": ["first", "second"]},
    },
    {"name": "submit", "description": "Give the words in their order.", "input_schema": {"required": ["words"]}},
    {"name": "print", "description": "Named like a builtin.", "input_schema": None},
]
HTML = {"content-type": "text/html"}


def event(name: str, data: str) -> bytes:
    return f"event: {name}\r\ndata: {data}\r\n\r\n".encode()


class OrsDouble:
    """``environments`` are the names it lists. ``sessions`` map a session to its task; what it knew is gone after a restart."""

    def __init__(self, *, environments: tuple[str, ...] = ("order", "shelves"), key: str = "", terminal: bool = False) -> None:
        self.environments = environments
        self.key = key
        self.terminal = terminal
        self.faults: deque[str] = deque()
        self.sessions: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.asked = anyio.Event()
        self.missing = ""
        """A page that this server does not have."""
        self.listing: bytes | None = b""
        """The answer to a question for its environments, if it is another; None: it never comes."""
        self.server: LocalServer

    @property
    def url(self) -> str:
        return self.server.url

    async def wait_for(self, path: str, count: int) -> None:
        """Wait until a page was asked for so often."""
        with anyio.fail_after(20):
            while self.counts[path] < count:
                await self.asked.wait()

    def make(self) -> Starlette:
        self.sessions.clear()
        self.runs.clear()
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        path = request.path_params["path"]
        self.counts[path] += 1
        self.asked.set()
        self.asked = anyio.Event()
        if self.key and request.headers.get("x-api-key") != self.key:
            return JSONResponse({"detail": f"wrong key {request.headers.get('x-api-key')}"}, 401)
        if path == self.missing:
            return JSONResponse({"detail": "Not Found"}, 404)
        if path == "list_environments" and self.listing != b"":
            if self.listing is None:
                await anyio.sleep_forever()
            return Response(self.listing, media_type="application/json")
        if path == "list_environments":
            return JSONResponse(list(self.environments))
        if path == "create_session":
            sid = str(uuid.uuid4())
            return StreamingResponse(iter([event("task_id", sid), event("end", "")]), media_type="text/event-stream")
        given, sid = json.loads(body or b"{}"), request.headers.get("x-session-id", "")
        place, _, page = path.partition("/")
        if page in ("splits", "num_tasks", "tasks"):
            return self._list(page, given)
        if path == "create":
            return self._create(sid, given)
        if path in ("delete", "delete_session"):
            self.sessions.pop(sid, None)
            return JSONResponse({"sid": sid})
        if sid not in self.sessions or place not in ("ping", *self.environments):
            return JSONResponse({"detail": "Active environment not found"}, 404)
        match page or place:
            case "ping":
                return JSONResponse({"status": "ok"})
            case "prompt":
                texts = ("Sort these words.", " ".join(self.sessions[sid]["words"]))
                return JSONResponse([{"text": text, "detail": None, "type": "text"} for text in texts])
            case "task_tools":
                return JSONResponse(
                    {"tools": TOOLS, "terminal_tool": {"name": "grade", "arg": "text"} if self.terminal else None}
                )
            case "call":
                return await self._call(sid, given)
        return JSONResponse({"detail": "Not Found"}, 404)

    def _list(self, page: str, given: dict[str, Any]) -> Response:
        if page == "splits":
            return JSONResponse([{"name": name, "type": "validation" if name == "trouble" else name} for name in SPLITS])
        count = SPLITS[given["split"]][1]
        return JSONResponse({"num_tasks": count} if page == "num_tasks" else {"tasks": [{}] * count})

    def _create(self, sid: str, given: dict[str, Any]) -> Response:
        if sid in self.sessions:
            return JSONResponse({"detail": "Session already exists"}, 400)
        first, count = SPLITS.get(given["split"], (0, 0))
        if not 0 <= given["index"] < count:
            return JSONResponse({"detail": "Invalid index"}, 400)
        trouble = REAL["TROUBLES"].get(given["index"], "") if given["split"] == "trouble" else ""
        self.sessions[sid] = {"words": REAL["draw_order"](first + given["index"]), "trouble": trouble}
        return Response("lost", 502) if self.faults and self._take("create answer lost") else JSONResponse({"sid": sid})

    def _take(self, fault: str) -> bool:
        if self.faults[0] != fault:
            return False
        self.faults.popleft()
        return True

    async def _call(self, sid: str, given: dict[str, Any]) -> Response:
        """A run has a name, under which its result is asked for again."""
        fault = self.faults.popleft() if self.faults else ""
        run = given.get("task_id") or uuid.uuid4().hex
        if not given.get("task_id"):
            if fault in ("500", "503", "starting"):
                headers = {"x-backend-state": "starting"} if fault == "starting" else {}
                return JSONResponse({"detail": "it is broken"}, 500 if fault == "500" else 503, headers)
            self.counts["runs"] += 1
            self.counts[f"{sid} {given['name']}"] += 1
            self.runs[run] = "" if fault == "raise" else self._run(self.sessions[sid], given["name"], given["input"])
        return StreamingResponse(self._stream(run, fault), media_type="text/event-stream")

    async def _stream(self, run: str, fault: str) -> AsyncIterator[bytes]:
        if fault == "cut before the name":
            raise ConnectionError
        if fault == "half an event":
            yield b"event: task_id\r\ndata: " + run.encode()
            return
        if fault == "forget":
            self.runs.clear()
        if fault == "hang":
            await anyio.sleep_forever()
        if run not in self.runs:
            yield event("error", "unknown task_id")
            return
        yield b": ping\r\n\r\n" + event("task_id", run)
        result = self.runs[run]
        match fault:
            case "cut after the name":
                raise ConnectionError
            case "cut in the result":
                yield event("chunk", result[:10]) + b"event: chunk\r\ndata: " + result[10:15].encode()
                raise ConnectionError
            case "hang after the name":
                await anyio.sleep_forever()
            case "endless":
                while True:
                    yield event("chunk", "x" * (1 << 20))
                    await anyio.lowlevel.checkpoint()
            case "no json":
                result = '{"ok": tru'
            case "text as reward":
                result = '{"ok": true, "output": {"blocks": [], "reward": "1.0"}}'
            case "deep":
                result = '{"ok": true, "output": ' + "[" * 100_000
            case "surrogates":
                result = '{"ok": true, "output": {"blocks": [{"text": "\\ud800 \\ud83d\\ude00"}], "reward": 0.5}}'
            case "key":
                result = json.dumps({"ok": True, "output": {"blocks": [{"text": self.key}], "reward": NAN}})
        if not result:
            yield event("error", "no dictionary")
            return
        for start in range(0, len(result), 4096):
            yield event("end" if start + 4096 >= len(result) else "chunk", result[start : start + 4096])

    def _run(self, task: dict[str, Any], name: str, given: dict[str, Any]) -> str:
        needed = {"compare": {"first", "second"}, "submit": {"words"}, "print": set(), "grade": {"text"}}.get(name)
        if needed is None or not needed <= set(given):
            error = f"{name!r} is not a valid tool" if needed is None else "Tool input validation error: a field is missing"
            return json.dumps({"ok": False, "error": error})
        trouble, right = task["trouble"], sorted(task["words"])
        text, reward, metadata = "thanks", None, None
        if name == "compare":
            text, reward = min(given["first"], given["second"]), -0.01
        elif name in ("submit", "grade"):
            if trouble == "raise":
                return ""
            words = given["words"] if name == "submit" else given["text"].split()
            reward = sum(a == b for a, b in zip(words, right, strict=False)) / len(right)
            if trouble in ("nan", "none"):
                reward = NAN if trouble == "nan" else None
            elif trouble == "unicode":
                text, reward = "  \u2028\x85 ü\U0001f600 " * 1000, 0.5
            elif trouble == "large":
                text, reward = "x" * (10 << 20), 0.25
            metadata = {"right": reward == 1}
        output = {"blocks": [{"text": text, "detail": None, "type": "text"}], "metadata": metadata, "reward": reward}
        finished = name in ("submit", "grade")
        return json.dumps({"ok": True, "output": {**output, "finished": finished}}, ensure_ascii=False)


NAN = float("nan")
"""Written into JSON as it is, as servers do that encode with Python's own encoder."""


@asynccontextmanager
async def ors_double(**options: Any) -> AsyncIterator[OrsDouble]:
    """A server that listens."""
    double = OrsDouble(**options)
    async with serve_application(double.make) as double.server:
        yield double
