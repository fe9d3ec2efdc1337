"""The stock, by name."""

from inventory.records import Record


class Stock:
    def __init__(self, records: list[Record]) -> None:
        self.records = {record.name: record for record in records}

    def remove(self, name: str, count: int) -> None:
        record = self.records.get(name, Record(name, 0, 0.0))
        self.records[name] = record._replace(count=record.count - count)
