"""Two evaluations task by task on the page, in a headless Chromium: `just test-browser`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.diagnosis.comparison import Graded, compare
from tests.support.browser_page import CHROMIUM, MARKUP, RUN, opened, shot
from tests.support.evaluated_run import publish_evaluation

pytest.importorskip("starlette")
pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
    pytest.mark.filterwarnings("default"),
]

START = {**{f"task-{number}": 0.0 for number in range(119)}, MARKUP: 1.0}
END = {**{task: index % 4 / 4 for index, task in enumerate(START)}, MARKUP: 0.0}

SIDES = [[Graded("", task, reward, reward >= 1) for task, reward in side.items()] for side in (START, END)]
SIZE = compare(*SIDES, names=("", "")).reward
EXPECTED = f"{SIZE.value:+.3f} {SIZE.low:+.3f} to {SIZE.high:+.3f}" if SIZE else ""


@asynccontextmanager
async def other(run: str) -> AsyncIterator[Bus]:
    async with MemoryServer().connect(run, worker="w") as bus:
        await bus.declare(plan_run(run, lanes=1))
        await publish_evaluation(bus, run, "end", dict.fromkeys(START, 1.0))
        yield bus


async def test_evaluations_are_compared_by_keyboard_and_another_run_by_choice(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "summary.json").write_text("{}")
    async with opened(10, "light", str(tmp_path), open_other=other) as (page, address, errors, bus):
        await publish_evaluation(bus, RUN, "start", START)
        await publish_evaluation(bus, RUN, "end", END)
        await page.goto(address)
        await page.wait_for_selector("main section")
        await page.keyboard.press("7")
        await page.get_by_text("page@end less page@start, over 120 tasks that both graded").wait_for()
        first = page.locator("section[aria-label=Evaluations] tbody tr").first
        assert (await first.inner_text()).split() == ["reward", *EXPECTED.split(), "better"]
        row = page.locator("section[aria-label=Tasks] tbody tr").first
        assert (await row.inner_text()).startswith(MARKUP) and "-1.000" in await row.inner_text()
        assert await page.locator("section[aria-label=Tasks] tbody tr").count() == 100
        await shot(page, "evaluations-light")
        await page.keyboard.press("]")
        await page.get_by_text(re.compile("101.120 of 120")).wait_for()
        await page.get_by_role("button", name="difference").click()
        await page.get_by_role("button", name="difference").click()
        await page.locator("th[aria-sort=descending]").wait_for()
        assert "+0.750" in await row.inner_text()
        await page.get_by_label("run of the first side").select_option("before")
        await page.get_by_text("page@end less before@end, over 120 tasks that both graded").wait_for()
        assert "worse" in await first.inner_text()
        await page.get_by_label("evaluation of the second side").select_option("start")
        await page.get_by_text("page@start less before@end").wait_for()
        await row.focus()
        await page.keyboard.press("Enter")
        await page.locator("main[data-view=episodes] tr[tabindex]").first.wait_for()
        assert errors == []


async def test_what_is_not_there_to_be_compared_is_said() -> None:
    async with opened(10, "light") as (page, address, errors, _):
        await page.goto(f"{address}#/evaluations")
        await page.get_by_text("page has no graded evaluation at all; it has none: it evaluated nothing").wait_for()
        assert errors == []
