"""Answers scrapes: the client library's application in a server that bounds its connections and answers no stranger's name.

Prometheus's own server has a thread for every connection for as long as that lives, and answers a page whose name now leads
here (rebinding). Above it is the exposition.
"""

import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from fleetbus_workers.serving.browser_guard import GuardSettings, build_guard_settings, is_allowed_host

MAX_CONNECTIONS = 32
"""Scrapes at a time; a further connection is closed."""

IDLE_SECONDS = 10.0
"""A connection that says or takes nothing for so long is closed, and its thread ends."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """One thread per connection, so many at a time."""

    daemon_threads = True
    request_queue_size = 4 * MAX_CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone or idle is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Scrape(WSGIRequestHandler):
    """One request, without a line in the log."""

    timeout = IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        pass


def open_server(registry: CollectorRegistry, host: str, port: int, allowed_hosts: Sequence[str]) -> WSGIServer:
    """A bound server, whose caller runs ``serve_forever``. Raises `OSError`, and `UnicodeError` for a host that is none."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    kind = type("Server", (ScrapeServer,), {"address_family": family})
    application = guard(make_wsgi_app(registry), build_guard_settings(host, allowed_hosts, ()))
    return make_server(str(address[0]), port, application, kind, Scrape)


def guard(application: Application, settings: GuardSettings) -> Application:
    """The application, under host names alone that no stranger can own."""

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if is_allowed_host(environment.get("HTTP_HOST", ""), settings):
            return application(environment, start)
        start("400 Bad Request", [("Content-Type", "text/plain")])
        return [b"this host name is not allowed here: --allow-host adds it\n"]

    return answer
