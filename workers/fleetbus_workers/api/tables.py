"""Rows as tables: Arrow, pandas, and files in Parquet, CSV or JSON lines. pyarrow and pandas are needed by those who ask."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.errors import UserError

Row = Mapping[str, Any]
"""Values by column; a column that a row lacks is empty there."""

FORMATS = (".parquet", ".csv", ".jsonl")

ROWS_AT_A_TIME = 1_000
"""Rows of one piece of a Parquet file: what is in memory at a time."""


def check_format(file: Path) -> None:
    """Raise `UserError` unless rows can be written to such a file here."""
    if file.suffix not in FORMATS:
        raise UserError(f"cannot write {file}: its name must end in one of {', '.join(FORMATS)}")
    if file.suffix == ".parquet":
        _import_package("pyarrow.parquet")


def write_rows(rows: Iterable[Row], file: Path, fields: Sequence[str]) -> int:
    """Write rows to a file in the format of its ending, replacing it at the end; returns how many. ``fields``: the columns.

    Parquet keeps lists as lists; CSV has them, and what is nested, as JSON text. Raises `UserError`.
    """
    check_format(file)
    part = file.with_name(file.name + ".part")
    write = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_json_lines}[file.suffix]
    try:
        count = write(rows, part, fields)
        part.replace(file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def build_arrow_table(rows: Iterable[Row], fields: Sequence[str]) -> Any:
    """A `pyarrow.Table` of all rows. Raises `UserError` without pyarrow."""
    arrow = _import_package("pyarrow")
    return arrow.table(_build_columns(list(rows), fields))


def build_data_frame(rows: Iterable[Row], fields: Sequence[str]) -> Any:
    """A `pandas.DataFrame` of all rows. Raises `UserError` without pandas."""
    pandas = _import_package("pandas")
    return pandas.DataFrame(_build_columns(list(rows), fields))


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise UserError(f"{package} is not installed: pip install {package}") from error


def _build_columns(rows: Sequence[Row], fields: Sequence[str]) -> dict[str, list[Any]]:
    """By field the values of all rows: numbers, text, lists of numbers; whatever is nested deeper as JSON text."""
    return {field: [_flatten(row.get(field)) for row in rows] for field in fields}


def _flatten(value: Any) -> Any:
    if isinstance(value, tuple | list) and all(isinstance(item, bool | int | float | str) for item in value):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float | str) else msgspec.json.encode(value).decode()


def _write_parquet(rows: Iterable[Row], file: Path, fields: Sequence[str]) -> int:
    arrow, parquet = _import_package("pyarrow"), _import_package("pyarrow.parquet")
    writer, count = None, 0
    try:
        for batch in _batches(rows):
            table = arrow.table(_build_columns(batch, fields))
            writer = writer or parquet.ParquetWriter(file, _widen_schema(arrow, table.schema))
            writer.write_table(table.cast(writer.schema))
            count += len(batch)
        if writer is None:
            parquet.write_table(arrow.table({field: [] for field in fields}), file)
    finally:
        if writer is not None:
            writer.close()
    return count


def _widen_schema(arrow: Any, schema: Any) -> Any:
    """Columns without any value in the first batch become numbers, as ``reward`` and ``seconds`` are."""
    fields = [arrow.field(item.name, arrow.float64()) if arrow.types.is_null(item.type) else item for item in schema]
    return arrow.schema(fields)


def _write_csv(rows: Iterable[Row], file: Path, fields: Sequence[str]) -> int:
    count = 0
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(fields)
        for row in rows:
            values = [_flatten(row.get(field)) for field in fields]
            writer.writerow([msgspec.json.encode(value).decode() if isinstance(value, list) else value for value in values])
            count += 1
    return count


def _write_json_lines(rows: Iterable[Row], file: Path, fields: Sequence[str]) -> int:
    count = 0
    with file.open("wb") as opened:
        for row in rows:
            opened.write(msgspec.json.encode({field: row.get(field) for field in fields}) + b"\n")
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
