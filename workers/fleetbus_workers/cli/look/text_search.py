"""``fleetbus episodes --text``: the episodes in which something was said, and an excerpt of each."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fleetbus.errors import UserError
from fleetbus_workers.command.event_loop import run_async

if TYPE_CHECKING:
    from fleetbus.recording.episodes import EpisodeRow
    from fleetbus.recording.text_index import Found
    from fleetbus_workers.api.reader import RunReader


def search_text(
    reader: RunReader, text: str, rows: list[EpisodeRow], limit: int
) -> tuple[list[EpisodeRow], Mapping[str, Found]]:
    """The rows of the episodes in one turn of which the words of ``text`` are, and what matches in the last ``limit`` of them
    (0: all). Raises `UserError`."""
    from fleetbus.recording.text_query import build_match

    async def search() -> tuple[list[EpisodeRow], Mapping[str, Found]]:
        async with reader.open_text_index() as index:
            matching = index.find_episodes(text)
            chosen = [row for row in rows if row.episode_id in matching]
            shown = chosen[-limit:] if limit > 0 else chosen
            return chosen, index.describe(text, [row.episode_id for row in shown])

    build_match(text)  # refuses before the log is read
    try:
        return run_async(search)
    except sqlite3.Error as error:
        raise UserError(f"the text index cannot be used: {error}: make room, or try again") from error


def print_found(found: Mapping[str, Found]) -> None:
    """Print the first match in each episode, one line each; matches within ``[[`` and ``]]``."""
    for each in found.values():
        excerpt = "".join(f"[[{part}]]" if number % 2 else part for number, part in enumerate(each.parts))
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in excerpt).split())
        more = f" (and in {each.texts - 1} others)" if each.texts > 1 else ""
        print(f"{each.episode_id} turn {each.turn}, {each.role}: {line}{more}")
