"""A small OpenAI-compatible server that judges by a function of the transcripts: stands for a model that cannot be reached."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.http_server import serve_application


class JudgeServer:
    """``answer`` makes the text from the conversation; ``statuses`` are what the next requests are refused with."""

    def __init__(self, answer: Callable[[list[dict[str, str]]], str]) -> None:
        self.answer = answer
        self.statuses: deque[int] = deque()
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.held: anyio.Event | None = None
        self.at_once = self.most_at_once = 0
        self.url = ""
        self.finish_reason = "stop"

    async def complete(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.keys.add(request.headers.get("authorization", ""))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.held is not None:
                await self.held.wait()
            if self.statuses:
                status = self.statuses.popleft()
                return JSONResponse({"error": f"refused {request.headers.get('authorization')}"}, status)
            text = self.answer(self.asked[-1]["messages"])
            return JSONResponse(
                {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": self.finish_reason}]}
            )
        finally:
            self.at_once -= 1

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "judge-1"}]})


def scores(*values: float) -> str:
    return f"Because. {json.dumps({'scores': values})}"


@asynccontextmanager
async def serve_judge(answer: Callable[[list[dict[str, str]]], str]) -> AsyncIterator[JudgeServer]:
    judge = JudgeServer(answer)
    routes = [Route("/v1/models", judge.list_models), Route("/v1/chat/completions", judge.complete, methods=["POST"])]
    async with serve_application(lambda: Starlette(routes=routes)) as server:
        judge.url = server.url
        yield judge
