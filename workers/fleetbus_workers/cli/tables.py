"""Tables on standard output: as wide as a terminal; elsewhere as wide as they are, so that grep and awk get a row as a line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

UNBROKEN_WIDTH = 10_000
"""Wider than any row, in columns."""


def print_table(table: Table) -> None:
    """Print it."""
    from fleetbus_workers.terminal import open_console

    width = None if sys.stdout.isatty() else UNBROKEN_WIDTH
    open_console(highlight=False, markup=False, width=width).print(table)
