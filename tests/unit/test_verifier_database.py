"""Queries of verifier code, as SQL that a real database takes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from fleetbus_workers.environment.isolation.sandbox.inside.database import Database


@pytest.fixture
def database() -> Iterator[Database]:
    connection = sqlite3.connect(":memory:")
    connection.executescript(
        "CREATE TABLE items (id, name, price); CREATE TABLE orders (item, count);"
        "INSERT INTO items VALUES (1, 'ink', 9), (2, 'pen', 3), (3, 'cup', NULL); INSERT INTO orders VALUES (2, 5);"
    )

    def ask(call: str, name: str, sql: str, params: list[Any]) -> dict[str, Any]:
        assert (call, name) == ("database", "seed")
        try:
            cursor = connection.execute(sql, params)
        except sqlite3.Error as error:
            raise RuntimeError(f"LookupError: {error}") from error
        return {"columns": [column[0] for column in cursor.description], "rows": [list(row) for row in cursor]}

    with closing(connection):
        yield Database(ask, "seed")


def test_conditions_order_and_limits_choose_rows(database: Database) -> None:
    items = database.table("items")
    assert items.eq("name", "ink").first() == {"id": 1, "name": "ink", "price": 9}
    names = items.select("name").sort("id", desc=True)
    assert [row["name"] for row in names.all()] == ["cup", "pen", "ink"]
    assert [row["name"] for row in names.limit(1).all()] == ["cup"]
    assert items.gt("price", 3).count() == items.lte("price", 3).count() == items.is_null("price").count() == 1
    assert items.gte("price", 3).lt("price", 9).neq("name", "cup").not_null("price").count() == 1
    assert items.in_("id", [1, 2]).not_in("id", [2]).ilike("name", "I%").count() == 1
    joined = items.join("orders", {"id": "item"}).select("items.name", "orders.count")
    assert joined.all() == [{"name": "pen", "count": 5}]
    assert items.eq("id", 7).first() is None


def test_assertions_say_what_was_asked(database: Database) -> None:
    items = database.table("items")
    items.eq("name", "pen").assert_exists().assert_eq("price", 3)
    with pytest.raises(AssertionError, match="no row of items"):
        items.eq("name", "car").assert_exists()
    with pytest.raises(AssertionError, match="a row of items"):
        items.assert_none()
    with pytest.raises(AssertionError, match="price of items is not 4"):
        items.eq("name", "pen").assert_eq("price", 4)


def test_a_query_that_the_database_refuses_has_no_success_and_one_that_could_not_be_asked_raises(database: Database) -> None:
    refused = database.query("SELECT price FROM nowhere")
    assert (refused.success, refused.rows, refused.error.startswith("no such")) == (False, [], True)

    def unanswered(*_: Any) -> Any:
        raise RuntimeError("FleetUnavailable: the platform is away")

    with pytest.raises(RuntimeError, match="the platform is away"):
        Database(unanswered, "seed").table("items").all()
