"""Output of commands: JSON, and tables as wide as a terminal; elsewhere as wide as they are: a row is a line for grep."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, TypeVar, cast

import click
import msgspec

from fleetbus_workers.command.terminal import open_console

if TYPE_CHECKING:
    from rich.table import Table

F = TypeVar("F", bound=Callable[..., object])

UNBROKEN_WIDTH = 10_000
"""Wider than any row, in columns."""


def json_option(what: str = "") -> Callable[[F], F]:
    """Decorator: ``--json`` as the argument ``as_json``; ``what`` is printed, and nothing else is on standard output."""
    option = click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON" if what else "Print JSON")

    def decorate(command: F) -> F:
        @wraps(command)
        def run(*arguments: object, as_json: bool, **options: object) -> object:
            if not as_json:
                return command(*arguments, as_json=False, **options)
            from fleetbus.config.settings import LogSettings
            from fleetbus.logs.setup import configure_logs_if_unset

            with configure_logs_if_unset(LogSettings()):
                return command(*arguments, as_json=True, **options)

        return option(cast("F", run))

    return decorate


def print_json(value: object) -> None:
    """Print structs and collections as indented JSON."""
    try:
        print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    except UnicodeEncodeError:  # a lone surrogate in somebody's text
        print(json.dumps(msgspec.to_builtins(value), indent=2))


def build_table(columns: str, right: str = "") -> Table:
    """An empty table without lines; ``columns`` and those at the ``right`` edge are separated by commas."""
    from rich.table import Table

    table = Table(*columns.split(","), box=None, header_style="bold", pad_edge=False)
    for name in right.split(",") if right else ():
        table.add_column(name, justify="right")
    return table


def print_table(table: Table) -> None:
    """Print it."""
    width = None if sys.stdout.isatty() else UNBROKEN_WIDTH
    open_console(highlight=False, width=width).print(table)
