"""Configures how servers of a cluster admit each other: by certificate and by password, over TLS. Pure.

A server that joins is trusted with every account, so this is as much worth as the admin's key. nats-server forgets the
password where ``--cluster`` is given on its command line: name, address and routes stand in this file alone.
"""

import json
from collections.abc import Sequence
from pathlib import PurePosixPath

CLUSTER_NAME = "fleetbus"
ROUTE_PORT = 6222
ROUTE_USER = "routes"

PING_SECONDS = 2
PINGS_MISSED = 2
"""A server that hangs with its connections open holds up whoever sends to it. Routes that answer no ping are closed after at
most (missed + 1) times the interval, 6 s instead of some minutes, and the others go on without it; one that continues joins
again. Figures: docs/cluster.md, "What faults of the servers cost"."""


def with_port(host: str, port: int = ROUTE_PORT) -> str:
    """``HOST`` or ``HOST:PORT`` as ``HOST:PORT``."""
    return host if ":" in host else f"{host}:{port}"


def cluster_config(
    routes: Sequence[str], password: str, folder: PurePosixPath, *, listen: str = f"0.0.0.0:{ROUTE_PORT}"
) -> str:
    """The text of the file: the servers' addresses as ``HOST:PORT``, one's own included. ``folder`` is where the server finds
    the certificates. It holds the password."""
    urls = [f"nats-route://{ROUTE_USER}:{password}@{route}" for route in routes]
    return "\n".join(
        [
            "cluster {",
            f"  name: {CLUSTER_NAME}",
            f"  listen: {json.dumps(listen)}",
            f'  ping_interval: "{PING_SECONDS}s"',
            f"  ping_max: {PINGS_MISSED}",
            f"  authorization {{ user: {ROUTE_USER}, password: {json.dumps(password)}, timeout: 5 }}",
            "  tls {",
            f"    cert_file: {json.dumps(str(folder / 'server.pem'))}",
            f"    key_file: {json.dumps(str(folder / 'server-key.pem'))}",
            f"    ca_file: {json.dumps(str(folder / 'ca.pem'))}",
            "    verify: true",
            "    timeout: 5",
            "  }",
            "  routes: [",
            *(f"    {json.dumps(url)}" for url in urls),
            "  ]",
            "}",
            "",
        ]
    )
