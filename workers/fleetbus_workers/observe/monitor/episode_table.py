"""The table of episodes as the page asks for it: filtered, sorted, and as CSV. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fleetbus.recording.episodes import EpisodeRow

SORTABLE = ("episode_id", "task_key", "reward", "turns", "tokens", "seconds", "attempts", "worker", "error_class")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would calculate: text of a log gets an apostrophe before it."""

DescribeState = Callable[[EpisodeRow], str]


def choose_rows(rows: Iterable[EpisodeRow], describe_state: DescribeState, query: Mapping[str, str]) -> list[EpisodeRow]:
    """The rows that match ``state``, ``group``, ``split``, ``label``, ``text`` (in id, task, error or worker), ``version`` of
    the policy and a reward from ``min_reward`` to ``max_reward``, by ``sort``: a name of `SORTABLE`, with ``-`` before it from
    the largest on; otherwise newest first. What has no value comes last; a number that is none matches everything."""
    filters = _build_filters(describe_state, query)
    chosen = [row for row in rows if all(matches(row) for matches in filters)][::-1] if filters else [*rows][::-1]
    wanted = query.get("sort", "")
    name = wanted.removeprefix("-")
    if name in SORTABLE:
        known = [row for row in chosen if _has_value(getattr(row, name))]
        known.sort(key=lambda row: getattr(row, name), reverse=wanted.startswith("-"))
        chosen = known + [row for row in chosen if not _has_value(getattr(row, name))]
    return chosen


def _has_value(field: Any) -> bool:
    return field not in (None, "") and field == field  # NaN, which equals nothing, has no place in an order


def find_neighbours(rows: Mapping[str, EpisodeRow], episode: str) -> dict[str, Any]:
    """The episodes requested just before and after this one, and the others of its task in its group, as an evaluation is a
    group of many tasks."""
    names = list(rows)
    if episode not in rows:
        return {"previous": None, "next": None, "siblings": []}
    at, one = names.index(episode), rows[episode]
    return {
        "previous": names[at - 1] if at else None,
        "next": names[at + 1] if at + 1 < len(names) else None,
        "siblings": [name for name, row in rows.items() if name != episode and _are_siblings(row, one)],
    }


def describe_neighbours(rows: Mapping[str, EpisodeRow], episode: str) -> dict[str, Any]:
    """As `find_neighbours`, with the ``rewards`` of the others of its group."""
    neighbours = find_neighbours(rows, episode)
    return {**neighbours, "rewards": {name: rows[name].reward for name in neighbours["siblings"]}}


def group_siblings(rows: Mapping[str, EpisodeRow]) -> dict[str, dict[str, EpisodeRow]]:
    """By name the rows among which `find_neighbours` finds the siblings of an episode: who describes all of them would look at
    each row for each row."""
    groups: dict[tuple[str, str], dict[str, EpisodeRow]] = {}
    for name, row in rows.items():
        if row.group_id:
            groups.setdefault((row.group_id, row.task_key), {})[name] = row
    return {name: groups.get((row.group_id, row.task_key), {name: row}) for name, row in rows.items()}


def _are_siblings(row: EpisodeRow, one: EpisodeRow) -> bool:
    return bool(one.group_id) and (row.group_id, row.task_key) == (one.group_id, one.task_key)


def build_csv(rows: Sequence[EpisodeRow], describe_state: DescribeState) -> str:
    """The rows with their state, one line each, no cell of which a spreadsheet calculates."""
    output = io.StringIO()
    fields = [field for field in EpisodeRow.__struct_fields__ if field != "timings"]
    writer = csv.writer(output)
    writer.writerow([*fields, "state"])
    for row in rows:
        facts = msgspec.structs.asdict(row)
        writer.writerow([_format_cell(value) for value in (*(facts[field] for field in fields), describe_state(row))])
    return output.getvalue()


def _format_cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


def _build_filters(describe_state: DescribeState, query: Mapping[str, str]) -> list[Callable[[EpisodeRow], bool]]:
    """Conditions upon a row that ``query`` asks for: read once, as there may be tens of thousands of rows."""
    filters: list[Callable[[EpisodeRow], bool]] = []
    if state := query.get("state"):
        filters.append(lambda row: describe_state(row) == state)
    if group := query.get("group"):
        filters.append(lambda row: row.group_id == group)
    if split := query.get("split"):
        filters.append(lambda row: row.split == split)
    if label := query.get("label"):
        filters.append(lambda row: label in row.labels)
    if (version := _parse(query, "version")) is not None:
        filters.append(lambda row: version in row.policy_versions)
    if (low := _parse(query, "min_reward")) is not None:
        filters.append(lambda row: row.reward is not None and row.reward >= low)
    if (high := _parse(query, "max_reward")) is not None:
        filters.append(lambda row: row.reward is not None and row.reward <= high)
    if text := query.get("text", "").lower():
        filters.append(
            lambda row: any(text in field.lower() for field in (row.episode_id, row.task_key, row.error_class, row.worker))
        )
    return filters


def _parse(query: Mapping[str, str], name: str) -> float | None:
    try:
        return float(query.get(name, ""))
    except ValueError:
        return None
