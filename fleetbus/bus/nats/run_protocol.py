"""The protocol of a run, in the metadata of its log: raised by whoever declares it, read by every worker before it works.

Above it is the bus; below it the API. Every role may ask for its log's configuration, so no right is needed for this
(docs/decisions/0217-a-protocol-version-in-the-run.md).
"""

from __future__ import annotations

from typing import Any

from fleetbus.bus.nats.api import JetStreamApi
from fleetbus_schemas.protocol import OWN, ProtocolVersion

MOST_DIGITS = 9
"""Of a number that somebody wrote there: Python refuses to read very long ones."""

_PROTOCOL, _NEEDED = "fleetbus_protocol", "fleetbus_needed_protocol"


def read_protocol(config: dict[str, Any]) -> ProtocolVersion:
    """The protocol that the configuration of a log tells; 0 where a version without it, or nobody who knows it, wrote it."""
    return ProtocolVersion(protocol=_read_number(config, _PROTOCOL), needed=_read_number(config, _NEEDED))


async def raise_protocol(api: JetStreamApi, stream: str) -> None:
    """Raise the run's protocol to this program's. It comes after all else that is declared, so that whoever it lets begin
    finds that. Repeated it changes nothing; lost, a program that needs more than the run has still waits."""
    config = (await api.ask(f"STREAM.INFO.{stream}"))["config"]
    found = read_protocol(config)
    raised = found.raise_to(OWN)
    if raised != found:
        told = {_PROTOCOL: str(raised.protocol), _NEEDED: str(raised.needed)}
        await api.ask(f"STREAM.UPDATE.{stream}", config | {"metadata": (config.get("metadata") or {}) | told})


def _read_number(config: dict[str, Any], name: str) -> int:
    text = str((config.get("metadata") or {}).get(name, ""))
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else 0
