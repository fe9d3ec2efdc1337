"""Tasks as Parquet, with the columns of Fleet's data preparation, so that trainers that read those read ours. Needs pyarrow."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetbus.errors import UserError
from fleetbus.tasks.datasets import INSTALL

ENV_CLASS = "fleet_task"
TASK_COLUMN = "task"
"""The whole entry of the tasks file as JSON: what is written is read back without loss."""


def read_parquet(name: str, data: bytes) -> list[dict[str, Any]]:
    """The rows of a file as entries of a tasks file. Raises `UserError`."""
    pyarrow, parquet = _import_pyarrow(name)
    try:
        rows: list[dict[str, Any]] = parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
        return [json.loads(row[TASK_COLUMN]) if row.get(TASK_COLUMN) else _build_entry(row) for row in rows]
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{name}: is not a Parquet file of tasks: {(str(error) or 'nothing in it').splitlines()[0]}") from None


def write_parquet(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Write entries of a tasks file. Raises `UserError` without pyarrow."""
    pyarrow, parquet = _import_pyarrow(str(path))
    variables = _collect_first_variables(entries)
    rows = [_build_row(entry, variables) for entry in entries]
    columns = list(rows[0]) if rows else []
    parquet.write_table(pyarrow.table({column: [row[column] for row in rows] for column in columns}), path)


def _build_row(entry: dict[str, Any], variables: dict[str, dict[str, Any]]) -> dict[str, object]:
    environment = str(entry.get("env_key", ""))
    known = entry.get("env_variables") or variables.get(environment, {})
    return {
        "prompt": [{"role": "user", "content": entry["prompt"]}],
        "env_class": ENV_CLASS,
        "task_key": entry["key"],
        "data_source": environment,
        "data_key": str(entry.get("data_key") or entry.get("data_id") or ""),
        "data_version": str(entry.get("data_version") or ""),
        "env_version": str(entry.get("version") or ""),
        "env_variables": json.dumps(known, ensure_ascii=False),
        "env_variable_keys": json.dumps(sorted(known)),
        TASK_COLUMN: json.dumps(entry, ensure_ascii=False),
    }


def _collect_first_variables(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first variables of each environment, for its tasks that have none."""
    found: dict[str, dict[str, object]] = {}
    for entry in entries:
        if entry.get("env_variables"):
            found.setdefault(str(entry.get("env_key", "")), entry["env_variables"])
    return found


def _build_entry(row: dict[str, Any]) -> dict[str, object]:
    entry = {
        name: value for name, value in row.items() if value is not None and name not in ("data_source", "env_variable_keys")
    }
    if not entry.get("env_key"):
        entry["env_key"] = row.get("data_source") or ""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        entry["prompt"] = "\n\n".join(str(message.get("content", "")) for message in prompt if message.get("role") == "user")
    return entry


def require_pyarrow(name: str) -> None:
    """Raises `UserError` without pyarrow: for those who write more than one file."""
    _import_pyarrow(name)


def _import_pyarrow(name: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{name}: Parquet needs pyarrow: {INSTALL}") from error
    return pyarrow, pyarrow.parquet
