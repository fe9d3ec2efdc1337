"""The full-text index is fed from a run's log: only what is new, and all of it where the log is another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.recording.text_indexing import open_text_index, update_from_log
from fleetbus_schemas import Action, Subjects, encode

SUBJECTS = Subjects("r")


async def test_a_log_is_indexed_from_where_the_index_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus.recording.text_indexing.BATCH_ENTRIES", 2)
    server = MemoryServer()
    async with server.connect("r", worker="w") as bus:
        await bus.declare(plan_run("r", lanes=1))

        async def answer(number: int, text: str) -> None:
            action = Action(episode_id=f"e{number}", attempt=1, turn=0, text=text)
            await bus.publish(SUBJECTS.action("e0", f"e{number}"), encode(action))

        for number in range(5):
            await answer(number, f"word{number} common")
        async with open_text_index(tmp_path / "text.sqlite", "log") as index:
            await update_from_log(index, bus, SUBJECTS)
            assert (index.last_sequence, len(index.find_episodes("common"))) == (5, 5)
            await answer(5, "word5 common")
            await update_from_log(index, bus, SUBJECTS)
            assert index.find_episodes("word5") == {"e5"}
            index.add([], 99)
            await update_from_log(index, bus, SUBJECTS)
            assert (index.last_sequence, len(index.find_episodes("common"))) == (6, 6), "the log went back in time"


async def test_an_index_is_temporary_where_its_folder_is_missing_or_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for file in (None, tmp_path / "gone" / "t", tmp_path / "file" / "t", Path("/proc/text.sqlite")):
        async with open_text_index(file, "log") as index:
            index.add([], 3)
            assert index.last_sequence == 3
    assert os.listdir(tmp_path) == ["file"]
