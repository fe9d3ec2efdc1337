"""Ports that nothing listens on, for servers that have to be told their port."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """So many different ones on loopback."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
