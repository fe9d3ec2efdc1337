"""Servers that a run needs and does not start: something has to listen where they are to be, before anything is started."""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from fleetbus.config.load import strip_credentials
from fleetbus.config.seats import parse_seats
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.environment.specs import find_adapter

CONNECT_SECONDS = 2.0
BY_URL = ("http", "openenv", "nemo-gym", "remote-gym")
"""Environments whose servers' addresses follow the name, one or several."""


def check_services(configuration: Configuration) -> None:
    """The key of a Tinker service, and something that listens where services and the servers of seats are to be. Raises
    `UserError`."""
    inference, tinker = configuration.inference, configuration.tinker
    urls: list[tuple[str, str]] = []
    if inference.engine == "openai":
        urls = [("inference.urls", url.strip()) for url in inference.urls.split(",") if url.strip()]
    elif inference.engine == "tinker":
        if not os.environ.get("TINKER_API_KEY"):
            raise UserError("the variable TINKER_API_KEY is not set: a Tinker service lets nobody in without a key")
        urls = [("tinker.url", tinker.url)] if tinker.url else []
    dead = [(setting, url, reason) for setting, url in urls if (reason := _probe(url))]
    dead = dead if len(dead) == len(urls) else []
    seats = [("run.seats", seat.url) for seat in parse_seats(configuration.run.seats) if seat.url]
    dead += [(setting, url, reason) for setting, url in seats if (reason := _probe(url))]
    if dead:
        setting, url, reason = dead[0]
        raise UserError(f"{setting}: nothing answers at {strip_credentials(url)}: {reason}")


def check_environment_servers(spec: str) -> None:
    """One of the servers of an environment that is reached by URL has to listen. Raises `UserError`."""
    name, _, rest = spec.partition(":")
    urls = [url.strip() for url in rest.split(",") if url.strip()] if find_adapter(spec).name in BY_URL else []
    reasons = [_probe(url) for url in urls]
    if reasons and all(reasons):
        url = strip_credentials(urls[0])
        raise UserError(f"environment {name}: nothing answers at {url}: {reasons[0]}; start its server first")


def _probe(url: str) -> str:
    """In words what is wrong with a server; "" if it listens, or is behind a proxy that only a request would go through."""
    try:
        parts = urlsplit(url)
        if parts.scheme in getproxies() and not proxy_bypass(parts.hostname or ""):
            return ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_SECONDS):
            return ""
    except TimeoutError:
        return f"no connection within {CONNECT_SECONDS:g} s"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
