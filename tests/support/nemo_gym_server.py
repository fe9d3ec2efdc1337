"""A resources server of NeMo Gym as its source has them (0.7.0, ``example_session_state_mgmt``): a session by cookie, two tools
of a counter, and a verdict; ``verdict`` replaces what ``/verify`` answers, ``faults`` what an address does, once each.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.http_server import LocalServer, serve_application

ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "add 1, add 2, get the count"}],
        "tools": [
            {
                "type": "function",
                "name": "increment_counter",
                "description": "",
                "strict": True,
                "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
            },
            {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}},
        ],
    },
    "initial_count": 3,
    "expected_count": 6,
}


class NemoGymDouble:
    """``asked`` are the addresses in the order of the requests, ``verified`` the bodies of ``/verify``."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.asked: list[str] = []
        self.verified: list[dict[str, Any]] = []
        self.verdict: Any = None
        self.faults: dict[str, list[int | str]] = {}
        self.hanging = anyio.Event()
        self.url = ""

    def build(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        path, body = request.path_params["path"], await request.json()
        self.asked.append(path)
        session = request.cookies.get("counter", "") or uuid4().hex
        answer = await self._spoil(path) or self._act(path, session, body)
        answer.set_cookie("counter", session, httponly=True, samesite="lax")
        return answer

    async def _spoil(self, path: str) -> Response | None:
        faults = self.faults.get(path)
        fault = faults.pop(0) if faults else None
        if fault == "hang":
            self.hanging.set()
            await anyio.sleep(60)
        if fault == "slow":
            await anyio.sleep(1.0)
            return None
        if fault == "redirect":
            return Response(status_code=307, headers={"location": "http://127.0.0.1:1/secret"})
        if isinstance(fault, str):
            kind = "text/plain" if fault.startswith("text/plain ") else "application/json"
            return Response(fault.removeprefix("text/plain "), media_type=kind)
        return JSONResponse("Internal Server Error", status_code=fault) if fault else None

    def _act(self, path: str, session: str, body: dict[str, Any]) -> Response:
        if path == "seed_session":
            self.counters.setdefault(session, body["initial_count"])
            return JSONResponse({})
        if path == "increment_counter":
            if not isinstance(body.get("count"), int):
                return JSONResponse({"detail": [{"loc": ["body", "count"], "msg": "Field required"}]}, status_code=422)
            self.counters[session] = self.counters.get(session, 0) + body["count"]
            return JSONResponse({"success": True})
        if path == "get_counter_value":
            return JSONResponse({"count": self.counters.get(session, 0)})
        if path != "verify":
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        self.verified.append(body)
        reward = float(body["expected_count"] == self.counters.get(session))
        measured = {"reward": reward, "mask_sample": False, "failure_kind": None, "failure_reason": None}
        told = body | (measured if self.verdict is None else self.verdict)
        return Response(json.dumps(told), media_type="application/json")  # NaN as Python writes it


@asynccontextmanager
async def nemo_gym_double() -> AsyncIterator[tuple[NemoGymDouble, LocalServer]]:
    double = NemoGymDouble()
    async with serve_application(double.build) as server:
        double.url = server.url
        yield double, server
