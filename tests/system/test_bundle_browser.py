"""A copy of a page in a headless Chromium, from the disk: it asks for nothing else, and chooses rows as the server does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.recording import load_recording
from fleetbus.recording.episodes import EpisodeIndex
from fleetbus.recording.reader import read_header
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import EpisodeLabeled, Subjects, encode
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.observe.monitor.episode_table import choose_rows
from tests.support.browser_page import CHROMIUM, MARKUP, shot

pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
    pytest.mark.filterwarnings("default"),
]

RECORDING = Path(__file__).parents[1] / "replay" / "recordings" / "guessing.fbrec"

QUERIES: list[dict[str, str]] = [
    {},
    {"state": "completed"},
    {"split": "eval"},
    {"label": "odd"},
    {"label": "none"},
    {"min_reward": "1"},
    {"max_reward": "0"},
    {"version": "1"},
    {"text": "guess"},
    {"sort": "-tokens"},
    {"sort": "reward", "split": "train"},
    {"sort": "seconds"},
    {"sort": "episode_id"},
]


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    header, entries = read_header(RECORDING), load_recording(RECORDING).entries
    names = [each.subject.rpartition(".")[2] for each in entries if each.subject.split(".")[2] == "task"]
    subjects, last = Subjects(header.run), entries[-1]
    labels = [
        StreamEntry(
            subject=subjects.label(name),
            payload=encode(EpisodeLabeled(episode_id=name, turn=0, add=("odd",), comment=MARKUP, author="Ada")),
            sequence=last.sequence + number,
            time_ns=last.time_ns,
        )
        for number, name in enumerate(names[:2], 1)
    ]
    file = tmp_path / "labelled.fbrec"
    with create_recording(file, header) as writer:
        writer.add([*entries, *labels])
    return file


@pytest.fixture
def copied(labelled: Path) -> Path:
    folder = labelled.parent / "a copy"
    assert run_program(["bundle", str(labelled), "-o", str(folder)]) == 0
    return folder


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Any, str, list[str]]]:
    """A browser page on the copy; the list has what its console complains of, and each address that is no file of the copy."""
    from playwright import async_api as playwright

    address = f"{folder.as_uri()}/index.html"
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page, wrong = await (await browser.new_context(viewport={"width": 1280, "height": 900})).new_page(), list[str]()
            page.set_default_timeout(60_000)
            page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            allowed = (folder.as_uri(), "data:")
            page.on("request", lambda asked: None if asked.url.startswith(allowed) else wrong.append(asked.url))
            yield page, address, wrong
        finally:
            await browser.close()


async def test_every_view_of_a_copy_is_drawn_from_the_disk_alone(copied: Path) -> None:
    async with opened(copied) as (page, address, wrong):
        await page.goto(address)
        await page.wait_for_function("() => document.getElementById('live').textContent.startsWith('copy of ')")
        assert "a copy of run" in await page.inner_text("section[aria-label='Over']")
        for view in ("overview", "curves", "groups", "episodes", "tasks", "runs"):
            await page.goto(f"{address}#/{'' if view == 'overview' else view}")
            await page.wait_for_selector(f"main[data-view='{view}'] section")
            await shot(page, f"copy-{view}")
        await page.goto(f"{address}#/episodes?label=odd")
        await page.wait_for_selector("tr[tabindex]")
        assert await page.locator("tr[tabindex]").count() == 2
        await page.locator("tr[tabindex]").first.click()
        await page.wait_for_selector("main[data-view='episode'] .token")
        said = page.locator("section[aria-label='Labels and comments']")
        assert MARKUP in await said.inner_text() and await said.locator("img, form, button").count() == 0
        await page.goto(f"{address}#/episode/nosuch")
        await page.get_by_text("episode nosuch is not in this copy").wait_for()
        assert wrong == []


async def test_a_copy_chooses_and_sorts_rows_as_the_served_page(labelled: Path, copied: Path) -> None:
    index = EpisodeIndex()
    for entry in load_recording(labelled).entries:
        index.add(entry)
    async with opened(copied) as (page, address, wrong):
        await page.goto(address)
        await page.wait_for_function("() => document.getElementById('live').textContent.startsWith('copy of ')")
        for query in QUERIES:
            found = await page.evaluate(
                "async (address) => (await (await fetch(address)).json())", f"/api/episodes?{urlencode(query)}"
            )
            expected = choose_rows(index.rows.values(), lambda row: row.outcome or "waiting", query)
            assert [row["episode_id"] for row in found["rows"]] == [row.episode_id for row in expected], query
            assert found["total"] == len(expected)
        assert wrong == []
