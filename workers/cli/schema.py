"""``fleetbus schema``: the contract, for programs that are not Python."""

from __future__ import annotations

import click


@click.command("schema")
def command() -> None:
    """Print the JSON Schema of every message."""
    import msgspec

    from schemas.export import json_schema

    print(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode())
