"""A server of chat completions that plays at random and fails at times: another policy's seat, for `benchmarks/chaos.py`."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "opponent"
FAILING = 0.05
"""Share of answers that are failures of the server."""


class Opponent(ThreadingHTTPServer):
    """Of one answer in twenty the server says that it cannot; ``answered`` and ``failed`` count."""

    daemon_threads = True

    def __init__(self, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.draw = random.Random(seed)
        self.answered = 0
        self.failed = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Opponent

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.server.draw.random() < FAILING:
            self.server.failed += 1
            self._reply(503, {"error": {"message": "busy"}})
            return
        self.server.answered += 1
        message = {"role": "assistant", "content": self.server.draw.choice(("yes", "hm"))}
        self._reply(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

    def _reply(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def run_opponent(seed: int) -> Iterator[Opponent]:
    """The server, on a free port of loopback, until the end of the block."""
    with Opponent(seed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
