"""Configures where a run's servers listen for clients that come by WebSocket. Pure.

For workers of networks that let out port 443 alone. They have the same keys, accounts and rights as by the plain port.
"""

import json
from pathlib import PurePosixPath

LOOPBACK = "127.0.0.1"
MAX_PORT = 65_535


def parse_address(text: str) -> str:
    """``PORT`` or ``HOST:PORT`` as ``HOST:PORT``, on loopback unless a host is given; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"{text} is no address: give PORT or HOST:PORT")
    return f"{host or LOOPBACK}:{int(port)}"


def websocket_listener(folder: PurePosixPath, address: str) -> list[str]:
    """Lines for the configuration of a run's servers. ``folder`` is where they find the certificates, ``address`` what
    `parse_address` returned. Clients learn of no other address than they were given: those of pods, and behind a balancer,
    lead nowhere from outside."""
    return [
        "websocket {",
        f"  listen: {json.dumps(address)}",
        '  handshake_timeout: "5s"',
        "  tls {",
        f"    cert_file: {json.dumps(str(folder / 'server.pem'))}",
        f"    key_file: {json.dumps(str(folder / 'server-key.pem'))}",
        "  }",
        "}",
    ]
