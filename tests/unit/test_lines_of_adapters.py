"""The pages on environments and trainers of others tell how long each adapter is: as long as its file is today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKERS = ROOT / "workers/fleetbus_workers"
FOLDERS = {"plug_in.md": WORKERS / "environment/adapters", "trainers.md": WORKERS / "trainers"}
TOLD = re.compile(r"`([\w./]+)`, (\d[\d,]*\d)\b(?: in (\d+) files)?")


def list_files(folder: Path, name: str) -> list[Path]:
    place = ROOT / name if name.startswith("docs/") else folder / name
    return sorted(place.glob("*.py")) if place.is_dir() else [place]


@pytest.mark.parametrize(("page", "least"), [("plug_in.md", 8), ("trainers.md", 10)])
def test_lines_of_adapters_are_those_of_their_files(page: str, least: int) -> None:
    told = TOLD.findall((ROOT / "docs" / page).read_text())
    assert len(told) >= least
    for name, lines, count in told:
        files = [file for file in list_files(FOLDERS[page], name) if file.stat().st_size or not count]
        assert int(lines.replace(",", "")) == sum(len(file.read_text().splitlines()) for file in files), name
        assert not count or int(count) == len(files), name
