#!/bin/bash
set -e
cd /app/inventory
cat > records.py <<'PY'
"""Lines of a stock file."""

from typing import NamedTuple


class Record(NamedTuple):
    name: str
    count: int
    price: float


def parse_line(line: str) -> Record:
    name, count, price = (field.strip() for field in line.split(";"))
    if int(count) < 0:
        raise ValueError(f"{name}: count {count} is below 0")
    return Record(name, int(count), float(price))
PY
cat > stock.py <<'PY'
"""What there is, by name."""

from inventory.records import Record


class Stock:
    def __init__(self, records: list[Record]) -> None:
        self.records = {record.name: record for record in records}

    def remove(self, name: str, count: int) -> None:
        record = self.records[name]
        if count > record.count:
            raise ValueError(f"{name}: {count} of {record.count}")
        self.records[name] = record._replace(count=record.count - count)
PY
cat > report.py <<'PY'
"""Figures about a stock."""

from inventory.stock import Stock


def total_value(stock: Stock) -> float:
    return round(sum(record.price * record.count for record in stock.records.values()), 2)
PY
