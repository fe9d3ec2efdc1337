"""What the log keeps of the configuration with each lineage: a replay needs no other file. Pure."""

from __future__ import annotations

import msgspec

from fleetbus.config.settings import Configuration

LINEAGE_TABLES = ("episode", "limits", "learner", "algorithm", "trainer", "evaluation")
"""Tables whose settings the log keeps with each lineage."""


def select_lineage_settings(configuration: Configuration) -> dict[str, dict[str, bool | int | float | str]]:
    """The tables that decide what a learner asks for, trains and publishes; none of them holds a secret."""
    return {table: msgspec.to_builtins(getattr(configuration, table)) for table in LINEAGE_TABLES}
