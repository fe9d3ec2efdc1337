"""Lines of a stock file."""

from typing import NamedTuple


class Record(NamedTuple):
    name: str
    count: int
    price: float


def parse_line(line: str) -> Record:
    name, count, price = line.split(",")
    return Record(name, int(count), float(price))
