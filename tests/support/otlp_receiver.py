"""A receiver of OTLP over HTTP that decodes with the protocol's own classes, and spans read from a file of OTLP JSON lines."""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Receiver:
    """Decodes what is posted to ``/v1/traces``; ``answers`` are status codes to give first, before 200."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: dict[bytes, str] = {}
        self.headers: list[dict[str, str]] = []
        self.answers: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                body = self.rfile.read(int(self.headers["content-length"]))
                status = receiver.answers.pop(0) if receiver.answers else 200
                if status == 200 and self.path == "/v1/traces":
                    receiver.take(body)
                self.send_response(status if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=partial(self._server.serve_forever, 0.02))
        self._thread.start()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for of_worker in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {each.key: each.value.string_value for each in of_worker.resource.attributes}
            for scope in of_worker.scope_spans:
                self.spans += scope.spans
                self.services |= {span.span_id: about["service.name"] for span in scope.spans}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


def spans_in_file(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [span for line in lines for each in line["resourceSpans"] for span in each["scopeSpans"][0]["spans"]]
