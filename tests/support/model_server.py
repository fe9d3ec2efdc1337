"""A small HTTP server that speaks as vLLM's does, written from its protocol: for tests of what calls such servers.

Its "model" is arithmetic: the next token and its log-probability follow from the tokens before it and the version of the
weights, so an answer that was continued elsewhere equals one that was not. Faults are switched on by attributes.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

STOP = 2
VOCABULARY = 97


def next_token(ids: Sequence[int], version: str) -> int:
    """Never `STOP`: answers end where a test says so."""
    return 3 + (sum((place + 1) * token for place, token in enumerate(ids[-5:])) + 31 * len(ids) + sum(version.encode())) % (
        VOCABULARY - 3
    )


def logprob(token: int, temperature: float) -> float:
    return -0.01 * (1 + token % 7) / (temperature or 1.0)


def answer(prompt: Sequence[int], count: int, version: str) -> list[int]:
    """What `ModelServer` answers with weights of one label."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, version))
    return ids[len(prompt) :]


class _KilledServer(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await super().shutdown(sockets)


class ModelServer:
    """``dialects`` are those it speaks. ``held`` True stops every stream after ``hold_after`` tokens until it is False."""

    def __init__(self, *, dialects: Sequence[str] = ("generate", "completions"), takes_weights: bool = True) -> None:
        self.dialects = dialects
        self.takes_weights = takes_weights
        self.label = "base"
        self.scaled = False
        self.generation_config: dict[str, Any] = {}
        """Sampling settings of the model's folder, which hold wherever a request leaves one out."""
        self.knows_only_the_protocol = False
        self.used: dict[str, Any] = {}
        """The settings that its last answer was sampled with."""
        self.stop_after = 0
        """An answer ends with `STOP` after so many tokens; 0: never."""
        self.statuses: deque[int] = deque()
        """Statuses that the next requests for tokens are answered with."""
        self.break_after: int | None = None
        """The next answer's connection is cut after so many tokens."""
        self.healthy = True
        self.metrics = ""
        """What it tells Prometheus; empty: it knows no such path."""
        self.bad_folders: set[str] = set()
        self.held_call = ""
        """A call to control it that is not answered while this stands here."""
        self.held = False
        self.hold_after = 0
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.reloads: list[str] = []
        self.calls: list[str] = []
        self.streaming = 0
        self.most_streaming = 0
        self.url = ""
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    def start(self) -> ModelServer:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/weight_info", self._weight_info),
            Route("/metrics", self._metrics),
            *[
                Route(f"/{name}", self._control, methods=["POST"])
                for name in ("pause", "resume", "collective_rpc", "reset_prefix_cache", "update_weight_version")
            ],
        ]
        configuration = uvicorn.Config(
            Starlette(routes=routes), host="127.0.0.1", port=self._port, log_level="critical", lifespan="off", ws="none"
        )
        self._server = _KilledServer(configuration)
        self._thread = threading.Thread(target=asyncio.run, args=(self._server.serve(),), daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            threading.Event().wait(0.005)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    def stop(self) -> None:
        """As a killed server: connections are closed in the middle."""
        self.held = False
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(20)
        self._server = None

    # What it answers

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny"}]})

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label}) if self.takes_weights else Response(status_code=404)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics, media_type="text/plain") if self.metrics else Response(status_code=404)

    async def _control(self, request: Request) -> Response:
        name = request.url.path.strip("/")
        body = json.loads(await request.body() or b"{}")
        self.calls.append(name)
        while name == self.held_call and not await request.is_disconnected():  # noqa: ASYNC110  # another thread sets it
            await asyncio.sleep(0.005)
        if name == "collective_rpc":
            folder = body["kwargs"]["weights_path"]
            self.reloads.append(folder)
            if Path(folder).name in self.bad_folders or not (Path(folder) / "model.safetensors").exists():
                self.label = "mixed"
                return JSONResponse({"error": "cannot load"}, status_code=500)
        if name == "update_weight_version":
            self.label = body["new_version"]
        return JSONResponse({"status": "ok"})

    async def _generate(self, request: Request) -> Response:
        if "generate" not in self.dialects:
            return Response(status_code=404)
        body = await request.json()
        return await self._answer(request, body, body["token_ids"], body["sampling_params"], self._generate_chunk)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        if isinstance(body["prompt"], str):
            chunk, prompt = self._text_chunk, list(body["prompt"].encode())
        elif "completions" in self.dialects:
            chunk, prompt = self._completions_chunk, body["prompt"]
        else:
            return JSONResponse({"error": {"message": "prompt must be a string"}}, status_code=400)
        return await self._answer(request, body, prompt, body, chunk)

    async def _answer(
        self, request: Request, body: dict[str, Any], prompt: list[int], parameters: dict[str, Any], chunk: Any
    ) -> Response:
        self.keys.add(request.headers.get("authorization", ""))
        if self.knows_only_the_protocol and (unknown := {"top_k", "min_p", "repetition_penalty"} & set(parameters)):
            return JSONResponse({"error": {"message": f"unknown: {sorted(unknown)}"}}, status_code=400)
        self.used = self.generation_config | {key: value for key, value in parameters.items() if value is not None}
        if body["stream"]:
            self.asked.append(body)
            if self.statuses:
                return JSONResponse({"error": {"message": "told to fail"}}, status_code=self.statuses.popleft())
            return StreamingResponse(self._lines(prompt, parameters, chunk), media_type="text/event-stream")
        token = next_token(prompt, self.label)
        return JSONResponse({"choices": [chunk([token], parameters, "length")]})

    async def _lines(self, prompt: list[int], parameters: dict[str, Any], chunk: Any) -> AsyncIterator[str]:
        self.streaming += 1
        self.most_streaming = max(self.most_streaming, self.streaming)
        ids, count, label = list(prompt), parameters["max_tokens"], self.label
        broken, self.break_after = self.break_after, None
        try:
            for index in range(count):
                while self.held and index >= self.hold_after:  # noqa: ASYNC110  # another thread's state
                    await asyncio.sleep(0.005)
                if broken is not None and index >= broken:
                    raise ConnectionResetError
                token = STOP if self.stop_after and index + 1 == self.stop_after else next_token(ids, label)
                ids.append(token)
                finish = "stop" if token == STOP else "length" if index + 1 == count else None
                made = chunk([token], parameters, finish)
                if finish and "weight_versions" in made:
                    made["weight_versions"] = [{"version": label, "start": 0, "end": index + 1}]
                yield f"data: {json.dumps({'choices': [made]})}\n\n"
                if finish:
                    break
            yield "data: [DONE]\n\n"
        finally:
            self.streaming -= 1

    def _temperature(self, parameters: dict[str, Any]) -> float:
        return float(parameters["temperature"]) if self.scaled else 1.0

    def _generate_chunk(self, ids: list[int], parameters: dict[str, Any], finish: str | None) -> dict[str, Any]:
        heat = self._temperature(parameters)
        content = [{"token_id": token, "logprob": logprob(token, heat), "rank": 1} for token in ids]
        return {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": finish,
            "weight_versions": None,
        }

    def _completions_chunk(self, ids: list[int], parameters: dict[str, Any], finish: str | None) -> dict[str, Any]:
        heat = self._temperature(parameters)
        values = [logprob(token, heat) for token in ids]
        logprobs = {"token_logprobs": values, "top_logprobs": [{f"token_id:{t}": v} for t, v in zip(ids, values, strict=True)]}
        return {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}

    def _text_chunk(self, ids: list[int], parameters: dict[str, Any], finish: str | None) -> dict[str, Any]:
        text = "" if ids == [STOP] else "".join(chr(97 + token % 26) for token in ids)
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


class ByteCodec:
    """One token per byte, as a tokenizer for text servers."""

    turn_end = STOP

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != STOP).decode("latin-1") if list(ids) != [STOP] else "<end>"


def is_unknown(values: Sequence[float]) -> bool:
    return all(math.isnan(value) for value in values)
