"""A proxy between an agent's client and its endpoint, in the agent's process, that misbehaves as networks and servers do.

The first call is told to come later (429), the answer to the second is lost on its way, all others pass. With ``spoils_keys``
calls arrive with a key of nobody's; without ``loses_answer`` no answer is lost.
"""

from __future__ import annotations

import http.client
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

TOO_MANY = b'{"error": {"message": "come later", "type": "rate_limit_error"}}'
URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")


class FaultyProxy(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(os.environ["ANTHROPIC_BASE_URL"])
        self.calls = 0
        self.spoils_keys = False
        self.loses_answer = True
        for name in URLS:
            path = urlsplit(os.environ[name]).path
            os.environ[name] = f"http://127.0.0.1:{self.server_port}{path}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls += 1
        if self.server.calls == 1:
            self._answer(429, {"Content-Type": "application/json", "Retry-After": "1"}, TOO_MANY)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        if self.server.spoils_keys:
            headers = {n: "Bearer nobody" if n.lower() == "authorization" else v for n, v in headers.items()}
            headers = {n: "nobody" if n.lower() in ("x-api-key", "x-goog-api-key") else v for n, v in headers.items()}
        target = http.client.HTTPConnection(self.server.target.hostname or "", self.server.target.port, timeout=60)
        target.request("POST", self.path, body, headers)
        answer = target.getresponse()
        content = answer.read()
        target.close()
        if self.server.calls == 2 and self.server.loses_answer:
            self.close_connection = True
            return
        self._answer(answer.status, {"Content-Type": answer.headers["Content-Type"]}, content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Silent."""
