"""Settings of a learner that differ from those of the lineage before: said once, when it takes over. Pure."""

from __future__ import annotations

from collections.abc import Mapping

Value = bool | int | float | str
Tables = Mapping[str, Mapping[str, Value]]


def list_changed_settings(before: Tables, after: Tables) -> dict[str, str]:
    """``old -> new`` by ``table.key``. What only one side has is left out: another version of the program does not know it, and
    a lineage that published no settings says nothing."""
    return {
        f"{table}.{key}" if "." not in key else key: f"{before[table][key]} -> {value}"
        for table, values in after.items()
        for key, value in values.items()
        if key in before.get(table, {}) and before[table][key] != value
    }
