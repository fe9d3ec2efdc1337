"""Holds command lines of files for deployments against the real one: all of it is parsed, and nothing runs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fleetbus_workers.cli.program import program


def parse_command_line(arguments: Sequence[str]) -> str:
    """The path of the command, ``gateway gym`` for example. Raises `click.UsageError` for what the program would refuse."""
    command: click.Command = program
    context = command.make_context("fleetbus", list(arguments))
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            raise click.UsageError(f"{context.command_path} needs a command")
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    return context.command_path.removeprefix("fleetbus ")
