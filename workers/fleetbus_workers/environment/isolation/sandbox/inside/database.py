"""A database as verifier code sees it: the calls of Fleet's SDK, each answered by the worker. Standard library alone.

`Database` for verifiers that call, `AsyncDatabase` for those that await: ``env.db().table("items").eq("name", "ink").first()``.
Databases are only read. A query that the database refuses is a result without success, as in the SDK; one that could not be
asked raises, so that no failure of the platform looks like a table without rows. Names go into the SQL as they are.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Ask = Callable[..., Any]

REFUSED = "LookupError: "
"""How the worker begins what the database itself says."""


class QueryResult:
    """``columns`` and ``rows`` (lists of values); ``success`` False and ``error`` if the database refused the query."""

    def __init__(self, columns: list[str], rows: list[list[Any]], error: str = "") -> None:
        self.success = not error
        self.columns = columns
        self.rows = rows
        self.error = error
        self.message = error

    def dicts(self) -> list[dict[str, Any]]:
        """One dictionary per row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class TableDescription:
    """A table by ``name``, and the ``sql`` that made it."""

    def __init__(self, name: str, sql: str) -> None:
        self.name = name
        self.sql = sql


class Description:
    """``tables`` of a database."""

    def __init__(self, tables: list[TableDescription]) -> None:
        self.success = True
        self.tables = tables


class Database:
    """One database of the episode by its name: ``current``, or another that the instance has."""

    def __init__(self, ask: Ask, name: str) -> None:
        self._ask = ask
        self.name = name

    def query(self, query: str, args: Iterable[Any] | None = None) -> QueryResult:
        try:
            answer = self._ask("database", self.name, query, list(args or []))
        except RuntimeError as failed:
            if not str(failed).startswith(REFUSED):
                raise
            return QueryResult([], [], str(failed).removeprefix(REFUSED))
        return QueryResult(answer["columns"], answer["rows"])

    def describe(self) -> Description:
        found = self.query("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name")
        return Description([TableDescription(*row) for row in found.rows])

    def table(self, table_name: str) -> Query:
        return Query(self.query, table_name)

    def exec(self, query: str, args: Iterable[object] | None = None) -> QueryResult:
        raise PermissionError("a verifier only reads its databases")

    def snapshot(self, *_: object, **__: Any) -> Any:
        raise NotImplementedError("snapshots and differences are the platform's: grade there (fleet.verifier = platform)")

    diff = snapshot


class Query:
    """Rows of one table; every method but the last gives a further query, and none asks before it has to."""

    def __init__(self, run: Callable[[str, list[Any]], QueryResult], table: str) -> None:
        self._run = run
        self._table = table
        self._columns = "*"
        self._joins: tuple[str, ...] = ()
        self._conditions: tuple[tuple[str, tuple[Any, ...]], ...] = ()
        self._order = ""
        self._limit: int | None = None

    def select(self, *columns: str) -> Query:
        return self._with(_columns=", ".join(columns) or "*")

    def limit(self, n: int | None) -> Query:
        return self._with(_limit=n)

    def sort(self, column: str, desc: bool = False) -> Query:
        return self._with(_order=f"{column} {'DESC' if desc else 'ASC'}")

    def join(self, other_table: str, on: dict[str, str]) -> Query:
        pairs = " AND ".join(f"{self._table}.{mine} = {other_table}.{theirs}" for mine, theirs in on.items())
        return self._with(_joins=(*self._joins, f"JOIN {other_table} ON {pairs}"))

    def eq(self, column: str, value: object) -> Query:
        return self._where(f"{column} = ?", value)

    def neq(self, column: str, value: object) -> Query:
        return self._where(f"{column} != ?", value)

    def gt(self, column: str, value: object) -> Query:
        return self._where(f"{column} > ?", value)

    def gte(self, column: str, value: object) -> Query:
        return self._where(f"{column} >= ?", value)

    def lt(self, column: str, value: object) -> Query:
        return self._where(f"{column} < ?", value)

    def lte(self, column: str, value: object) -> Query:
        return self._where(f"{column} <= ?", value)

    def in_(self, column: str, values: Iterable[object]) -> Query:
        return self._among(column, "IN", values)

    def not_in(self, column: str, values: Iterable[object]) -> Query:
        return self._among(column, "NOT IN", values)

    def is_null(self, column: str) -> Query:
        return self._where(f"{column} IS NULL")

    def not_null(self, column: str) -> Query:
        return self._where(f"{column} IS NOT NULL")

    def ilike(self, column: str, pattern: str) -> Query:
        return self._where(f"{column} LIKE ?", pattern)

    def all(self) -> list[dict[str, Any]]:
        return self._run(*self._sql()).dicts()

    def first(self) -> dict[str, Any] | None:
        rows = self.limit(1).all()
        return rows[0] if rows else None

    def count(self) -> int:
        rows = self._run(*self.select("COUNT(*)").limit(None)._sql()).rows
        return int(rows[0][0]) if rows else 0

    def assert_exists(self) -> Query:
        if self.first() is None:
            raise AssertionError(f"no row of {self._table} matches: {self._sql()}")
        return self

    def assert_none(self) -> Query:
        found = self.first()
        if found is not None:
            raise AssertionError(f"a row of {self._table} matches: {found}: {self._sql()}")
        return self

    def assert_eq(self, column: str, value: object) -> Query:
        found = self.first()
        if found is None or found.get(column) != value:
            raise AssertionError(f"{column} of {self._table} is not {value!r}: {found}: {self._sql()}")
        return self

    def _with(self, **changes: Any) -> Query:
        other = type(self)(self._run, self._table)
        vars(other).update(vars(self), **changes)
        return other

    def _where(self, condition: str, *values: Any) -> Query:
        return self._with(_conditions=(*self._conditions, (condition, values)))

    def _among(self, column: str, operator: str, values: Iterable[Any]) -> Query:
        given = tuple(values)
        return self._where(f"{column} {operator} ({', '.join('?' * len(given))})", *given)

    def _sql(self) -> tuple[str, list[Any]]:
        parts = [f"SELECT {self._columns} FROM {self._table}", *self._joins]
        if self._conditions:
            parts.append("WHERE " + " AND ".join(condition for condition, _ in self._conditions))
        if self._order:
            parts.append(f"ORDER BY {self._order}")
        if self._limit is not None:
            parts.append(f"LIMIT {int(self._limit)}")
        return " ".join(parts), [value for _, values in self._conditions for value in values]


class AsyncDatabase:
    """The same for verifiers that await."""

    def __init__(self, ask: Ask, name: str) -> None:
        self._database = Database(ask, name)
        self.name = name

    async def query(self, query: str, args: Iterable[Any] | None = None) -> QueryResult:
        return self._database.query(query, args)

    async def describe(self) -> Description:
        return self._database.describe()

    async def exec(self, query: str, args: Iterable[object] | None = None) -> QueryResult:
        return self._database.exec(query, args)

    async def snapshot(self, *_: object, **__: Any) -> Any:
        return self._database.snapshot()

    diff = snapshot

    def table(self, table_name: str) -> AsyncQuery:
        return AsyncQuery(self._database.query, table_name)


class AsyncQuery(Query):
    """`Query` whose answers are awaited."""

    async def all(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._plain().all()

    async def first(self) -> dict[str, Any] | None:  # type: ignore[override]
        return self._plain().first()

    async def count(self) -> int:  # type: ignore[override]
        return self._plain().count()

    async def assert_exists(self) -> AsyncQuery:  # type: ignore[override]
        self._plain().assert_exists()
        return self

    async def assert_none(self) -> AsyncQuery:  # type: ignore[override]
        self._plain().assert_none()
        return self

    async def assert_eq(self, column: str, value: object) -> AsyncQuery:  # type: ignore[override]
        self._plain().assert_eq(column, value)
        return self

    def _plain(self) -> Query:
        plain = Query(self._run, self._table)
        vars(plain).update(vars(self))
        return plain
