"""``fleetbus agents``: agents with their own loops that were tried, and what was needed to train them as they are."""

import click
import msgspec

from fleetbus_workers.cli.output import json_option
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.environment.adapters.agent.known import KNOWN_AGENTS


@click.command("agents")
@json_option()
def command(as_json: bool) -> int:
    """List agents with their own loops that were tried: install, protocol, what was needed (docs/agents.md)."""
    if as_json:
        click.echo(msgspec.json.encode(KNOWN_AGENTS).decode())
        return FINISHED
    for agent in KNOWN_AGENTS:
        streamed = ", streamed too" if agent.streams else ""
        click.echo(f"{agent.name:16}{agent.install}\n{'':16}{', '.join(agent.dialects)}{streamed}")
        for label, text in (("trains", agent.trains), ("needs", agent.needed)):
            if text:
                click.echo(f"{'':16}{label}: {text}")
    return FINISHED
