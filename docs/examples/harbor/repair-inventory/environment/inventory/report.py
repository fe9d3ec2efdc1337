"""Figures about a stock."""

from inventory.stock import Stock


def total_value(stock: Stock) -> float:
    return sum(round(record.price, 1) * record.count for record in stock.records.values())
