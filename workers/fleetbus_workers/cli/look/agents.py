"""``fleetbus agents``: agents with their own loops that were tried, and what was needed to train them as they are."""

from typing import Any

import click
import msgspec

from fleetbus_workers.cli.output import json_option
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.environment.adapters.agent.known import KNOWN_AGENTS
from fleetbus_workers.environment.adapters.agent.tried import SHOWN, TriedAgent, load_tried


@click.command("agents")
@json_option()
def command(as_json: bool) -> int:
    """List agents with their own loops that were tried: install, protocol, what was shown and needed (docs/agents.md)."""
    if as_json:
        known: list[Any] = [{"kind": "client", **msgspec.to_builtins(agent)} for agent in KNOWN_AGENTS]
        played = [{"kind": "shipped", **msgspec.to_builtins(agent)} for agent in load_tried()]
        click.echo(msgspec.json.encode([*known, *played]).decode())
        return FINISHED
    for agent in KNOWN_AGENTS:
        streamed = ", streamed too" if agent.streams else ""
        click.echo(f"{agent.name:20}{agent.install}\n{'':20}{', '.join(agent.dialects)}{streamed}")
        for label, text in (("trains", agent.trains), ("needs", agent.needed)):
            if text:
                click.echo(f"{'':20}{label}: {text}")
    click.echo("\nplayed as shipped, with kills:")
    for tried in load_tried():
        click.echo(f"{tried.name:20}{tried.install}\n{'':20}{describe_tried(tried)}")
        if tried.needed:
            click.echo(f"{'':20}needs: {tried.needed}")
    return FINISHED


def describe_tried(agent: TriedAgent) -> str:
    """One line of what an agent showed."""
    if not agent.plays:
        return f"{agent.version} {agent.date}: {agent.reason}"
    shown = [name for name, field in SHOWN.items() if getattr(agent, field)]
    path = f"{agent.extending} of {agent.following} calls on one path"
    return f"{agent.version} {agent.date}: {', '.join([*agent.dialects, *shown, path])}; kills: {agent.kills}"
