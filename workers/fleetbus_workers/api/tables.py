"""Rows as tables: Arrow, pandas, and files in Parquet, CSV or JSON lines. pyarrow and pandas are needed by those who ask."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from fleetbus.errors import UserError

Row = Mapping[str, Any]
"""Values by column; a column that a row lacks is empty there."""

ColumnType = Literal["text", "integer", "number", "flag", "texts", "integers", "numbers", "flags"]
Columns = Mapping[str, ColumnType]
"""The columns of a table in order. The plural ones are lists; what is nested deeper is JSON text."""

_COLUMN_TYPES: dict[Any, ColumnType] = {
    int: "integer",
    float: "number",
    float | None: "number",
    bool: "flag",
    tuple[str, ...]: "texts",
    tuple[int, ...]: "integers",
    tuple[float, ...]: "numbers",
    tuple[bool, ...]: "flags",
}

FORMATS = (".parquet", ".csv", ".jsonl")

ROWS_AT_A_TIME = 1_000
"""Rows of one piece of a Parquet file: what is in memory at a time."""


def list_columns(kind: type[msgspec.Struct]) -> dict[str, ColumnType]:
    """The columns of a table of such rows."""
    hints = get_type_hints(kind)
    return {field: _COLUMN_TYPES.get(hints[field], "text") for field in kind.__struct_fields__}


def build_rows(rows: Iterable[msgspec.Struct], columns: Columns) -> Iterator[Row]:
    """Rows as a table has them."""
    return ({field: getattr(row, field) for field in columns} for row in rows)


def check_format(file: Path) -> None:
    """Raise `UserError` unless rows can be written to such a file here."""
    if file.suffix not in FORMATS:
        raise UserError(f"cannot write {file}: its name must end in one of {', '.join(FORMATS)}")
    if file.suffix == ".parquet":
        _import_package("pyarrow.parquet")


def write_rows(rows: Iterable[Row], file: Path, columns: Columns) -> int:
    """Write rows to a file in the format of its ending, replacing it at the end; returns how many.

    Parquet keeps lists as lists; CSV has them, and what is nested, as JSON text. Raises `UserError`.
    """
    check_format(file)
    part = file.with_name(file.name + ".part")
    write = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_json_lines}[file.suffix]
    try:
        count = write(rows, part, columns)
        part.replace(file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def build_arrow_table(rows: Iterable[Row], columns: Columns) -> Any:
    """A `pyarrow.Table` of all rows. Raises `UserError` without pyarrow."""
    arrow = _import_package("pyarrow")
    return arrow.table(_build_values(list(rows), columns), schema=_build_schema(arrow, columns))


def build_data_frame(rows: Iterable[Row], columns: Columns) -> Any:
    """A `pandas.DataFrame` of all rows. Raises `UserError` without pandas."""
    pandas = _import_package("pandas")
    return pandas.DataFrame(_build_values(list(rows), columns))


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise UserError(f"{package} is not installed: pip install {package}") from error


def _build_values(rows: Sequence[Row], columns: Columns) -> dict[str, list[Any]]:
    """By field the values of all rows: numbers, text, lists of numbers; what is nested deeper as JSON text."""
    return {field: [_flatten(row.get(field)) for row in rows] for field in columns}


def _flatten(value: object) -> Any:
    if isinstance(value, tuple | list) and all(isinstance(item, bool | int | float | str) for item in value):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float | str) else msgspec.json.encode(value).decode()


def _write_parquet(rows: Iterable[Row], file: Path, columns: Columns) -> int:
    arrow, parquet = _import_package("pyarrow"), _import_package("pyarrow.parquet")
    schema, count = _build_schema(arrow, columns), 0
    with parquet.ParquetWriter(str(file), schema) as writer:
        for batch in _batches(rows):
            writer.write_table(arrow.table(_build_values(batch, columns), schema=schema))
            count += len(batch)
    return count


def _build_schema(arrow: Any, columns: Columns) -> object:
    """Types that do not depend on the rows: a column may be empty in the first of them."""
    types = {"text": arrow.string(), "integer": arrow.int64(), "number": arrow.float64(), "flag": arrow.bool_()}
    types |= {f"{name}s": arrow.list_(types[name]) for name in ("text", "integer", "number", "flag")}
    return arrow.schema([(name, types[kind]) for name, kind in columns.items()])


def _write_csv(rows: Iterable[Row], file: Path, columns: Columns) -> int:
    count = 0
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(columns)
        for row in rows:
            values = [_flatten(row.get(field)) for field in columns]
            writer.writerow([msgspec.json.encode(value).decode() if isinstance(value, list) else value for value in values])
            count += 1
    return count


def _write_json_lines(rows: Iterable[Row], file: Path, columns: Columns) -> int:
    count = 0
    with file.open("wb") as opened:
        for row in rows:
            opened.write(msgspec.json.encode({field: row.get(field) for field in columns}) + b"\n")
            count += 1
    return count


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_AT_A_TIME:
            yield batch
            batch = []
    if batch:
        yield batch
