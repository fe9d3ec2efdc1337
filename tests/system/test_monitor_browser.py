"""The page in a headless Chromium: no, ten and ten thousand episodes, light and dark, by keyboard: `just test-browser`.

Set MONITOR_SCREENSHOTS to a folder to look at what was drawn.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import anyio
import pytest

from fleetbus.delivery.control import Control
from fleetbus_schemas import Heartbeat, WorkerStarted, encode
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.termination import Termination
from tests.support.browser_page import CHROMIUM, MARKUP, SUBJECTS, opened, shot

pytest.importorskip("starlette")
pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_is_drawn_without_a_complaint(scheme: str) -> None:
    for episodes in (0, 10, 10_000) if scheme == "light" else (10,):
        async with opened(episodes, scheme) as (page, address, errors, _):
            await page.goto(address)
            await page.wait_for_function("() => document.getElementById('live').textContent === 'live'")
            await page.wait_for_function(f"() => document.body.innerText.includes('{min(episodes, 999)}'.slice(0, 1))")
            await page.wait_for_function(
                f"() => fetch('/api/overview').then(r => r.json()).then(o => o.numbers.finished_episodes === {episodes})"
            )
            for view in ("overview", "curves", "groups", "episodes"):
                await page.goto(f"{address}#/{'' if view == 'overview' else view}")
                await page.wait_for_selector(f"main[data-view='{view}'] section")
                await page.wait_for_timeout(600)  # an event's worth, so that screenshots show numbers
                await shot(page, f"{episodes}-{view}-{scheme}")
            rows = await page.locator("tr[tabindex]").count()
            assert rows == min(episodes, 100)
            assert errors == []


async def test_a_note_is_shown_and_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.observe.monitor.app.find_notes", lambda state, now_ns: [f"no more to learn {MARKUP}"])
    monkeypatch.setattr("fleetbus_workers.observe.monitor.app.find_stalls", lambda *args, **options: [])
    async with opened(10, "light") as (page, address, errors, _):
        await page.goto(address)
        note = page.locator("section[aria-label='Notes'] p")
        await note.wait_for()
        assert await note.inner_text() == f"no more to learn {MARKUP}"
        assert await page.locator("[role='alert']").count() == 0
        await shot(page, "note-light")
        assert errors == []


async def test_a_run_that_is_over_says_so_and_is_no_alarm_though_its_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(watch: RunObserver, now: float) -> Termination:
        watch.health.record_failure("the NATS server does not answer", now)
        return Termination(how="stopped", since_ns=1, seconds=2.0, line=f"over: it was stopped normally {MARKUP}")

    monkeypatch.setattr(RunObserver, "find_termination", ended)
    async with opened(10, "light") as (page, address, errors, _):
        await page.goto(address)
        told = page.locator("section[aria-label='Over'] p")
        await told.wait_for()
        assert await told.inner_text() == f"over: it was stopped normally {MARKUP}"
        assert await page.locator("[role='alert']").count() == 0
        assert "no longer served" in await page.inner_text("main")
        assert await page.inner_text("#live") == "over"
        await shot(page, "over-light")
        assert errors == []


async def test_the_keyboard_reaches_an_episode_and_its_tokens_and_markup_stays_text() -> None:
    async with opened(300, "dark") as (page, address, errors, _):
        await page.goto(address)
        await page.wait_for_function(
            "() => fetch('/api/overview').then(r => r.json()).then(o => o.numbers.finished_episodes === 300)"
        )
        await page.keyboard.press("4")
        await page.wait_for_selector("tr[tabindex]")
        await page.keyboard.press("]")
        await page.locator("form", has_text=re.compile("101.200 of 300")).wait_for()
        await page.keyboard.press("[")
        await page.locator("form", has_text=re.compile(" 1.100 of 300")).wait_for()
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".token")
        assert await page.locator(".message.assistant .tokens .token:not(.masked)").count() == 20
        assert await page.locator("main img").count() == 0
        assert MARKUP in await page.inner_text("main")
        heats = await page.eval_on_selector_all(
            ".token:not(.masked)", "all => all.map(one => getComputedStyle(one).backgroundColor)"
        )
        assert len(set(heats)) > 10
        await shot(page, "300-episode-dark")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("tr[tabindex]")
        await page.keyboard.press("/")
        await page.keyboard.type("e00007")
        await page.keyboard.press("Enter")
        await page.locator("caption", has_text="1 episodes").wait_for()
        assert await page.locator("tr[tabindex]").count() == 1
        assert errors == []


async def test_a_table_is_filtered_while_somebody_types_and_sorted_by_a_click() -> None:
    async with opened(300, "light") as (page, address, errors, _):
        await page.goto(f"{address}#/episodes")
        await page.wait_for_selector("tr[tabindex]")
        await page.locator("input[type=search]").press_sequentially("e0000", delay=60)
        await page.locator("caption", has_text="10 episodes").wait_for()
        assert await page.evaluate("document.activeElement.name") == "text"
        await page.keyboard.type("7")
        await page.locator("caption", has_text="1 episodes").wait_for()
        assert await page.input_value("input[type=search]") == "e00007"
        await page.goto(f"{address}#/episodes?split=train")
        await page.get_by_role("button", name="reward").click()
        await page.get_by_role("button", name="reward").click()
        await page.locator("th[aria-sort=descending]").wait_for()
        rewards = await page.locator("tbody tr td:nth-child(3)").all_inner_texts()
        assert rewards == sorted(rewards, reverse=True) and rewards[0] == "1.00"
        async with page.expect_download() as downloading:
            await page.get_by_role("link", name="CSV").click()
        file = anyio.Path(await (await downloading.value).path())
        assert len((await file.read_text()).splitlines()) == 301
        assert errors == []


async def test_what_was_said_is_searched_and_leads_to_the_turn_and_markup_stays_text() -> None:
    async with opened(300, "light") as (page, address, errors, _):
        await page.goto(f"{address}#/episodes")
        await page.wait_for_selector("tr[tabindex]")
        await page.locator("input[name=said]").press_sequentially("onerror alert", delay=40)
        await page.locator("caption", has_text="2 episodes").wait_for()
        assert await page.evaluate("document.activeElement.name") == "said"
        assert await page.locator("td mark").all_inner_texts() == ["onerror", "alert"] * 2
        assert f"turn 0, user: {MARKUP} and in 1 others" in await page.locator("tbody tr").first.inner_text()
        assert await page.locator("main img").count() == 0
        await shot(page, "300-said-light")
        await page.locator("tbody tr").first.click()
        await page.wait_for_selector(".message.assistant[aria-current]")
        assert page.url.endswith("#/episode/e00299?turn=0")
        assert await page.locator(".message[aria-current]").count() == 3
        await page.goto(f"{address}#/episodes?said=%22%20OR%20--")
        await page.get_by_text("no such episode").wait_for()
        await page.goto(f"{address}#/episodes?said=--")
        await page.get_by_text("there is nothing to search for").wait_for()
        assert len(errors) == 1 and "400" in errors.pop()


async def test_tasks_and_runs_are_views_and_lines_are_smoothed(tmp_path: Path) -> None:
    curves = {"steps": [1, 2], "reward_by_step": [0.25, 0.75], "success_by_step": [0.0, 0.5], "success_end": 0.5}
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "summary.json").write_text(json.dumps(curves | {"run": run}))
    async with opened(10_000, "light", str(tmp_path)) as (page, address, errors, _):
        await page.goto(f"{address}#/tasks")
        rows = page.locator("section[aria-label=Tasks] tbody tr")
        await rows.first.wait_for()
        assert await rows.count() == 100 and "1 environment" in await page.locator("caption").first.text_content()
        await page.keyboard.press("6")
        await page.locator("td", has_text="fleetbus monitor second").wait_for()
        assert await page.locator("section[aria-label='Reward of each run'] path.line").count() == 3
        await page.locator("tr", has_text="first").last.click()
        await page.locator("li", has_text="reward of first").wait_for()
        await page.locator("select[name=smooth]").select_option("20")
        await page.locator("path.behind").first.wait_for()
        assert "smooth=20" in page.url and "beside=first" in page.url
        assert errors == []


async def test_an_episode_is_labelled_and_commented_and_found_by_its_label() -> None:
    async with opened(10, "light", acts=True) as (page, address, errors, _):
        await page.goto(address)
        await page.goto(f"{address.partition('?')[0]}#/episode/e00009")
        said = page.locator("section[aria-label='Labels and comments']")
        await said.get_by_label("Label", exact=True).fill("odd")
        await said.get_by_label("Comment", exact=True).fill(MARKUP)
        await said.get_by_label("Your name").fill("Ada")
        await said.get_by_role("button", name="add").click()
        await page.get_by_text("stored in the log").wait_for()
        await said.get_by_text(MARKUP).wait_for()
        assert "Ada" in await said.inner_text() and await said.get_by_label("Your name").input_value() == "Ada"
        await said.get_by_label("What is labelled").select_option("0")
        await said.get_by_label("Label", exact=True).fill("two words")
        await said.get_by_label("Label", exact=True).press("Enter")
        await page.get_by_text("no label can be called 'two words'").wait_for()
        await shot(page, "10-episode-labelled-light")
        await said.get_by_role("link", name="odd").click()
        await page.wait_for_selector("main[data-view='episodes'] tr[tabindex]")
        assert await page.locator("tr[tabindex]").count() == 1
        await page.locator("tr[tabindex]").click()
        await said.get_by_role("button", name="remove label odd").click()
        await said.get_by_text("no label").wait_for()
        await said.get_by_role("button", name="remove comment").click()
        await page.get_by_text("comment removed").wait_for()
        assert [each for each in errors if "400" not in each] == []


async def test_admission_is_paused_by_a_click_while_the_page_is_drawn_again() -> None:
    paused: list[bool] = []
    async with opened(10, "light", acts=True) as (page, address, errors, bus), anyio.create_task_group() as tasks:

        async def work() -> None:
            control = Control(
                bus, SUBJECTS, role="learner", worker="learner", drain=anyio.Event(), cancel=lambda episodes, author: (),
                busy_with=lambda: (), pause=paused.append,
            )  # fmt: skip
            async with anyio.create_task_group() as serving:
                serving.start_soon(control.run)
                while True:
                    beat = Heartbeat(role="learner", worker="learner", slots=2, paused=paused[-1:] == [True])
                    await bus.broadcast(SUBJECTS.heartbeat("learner", "learner"), encode(beat))
                    await anyio.sleep(0.3)

        tasks.start_soon(work)
        await page.goto(address)
        await page.get_by_role("button", name="pause admission").click()
        await page.get_by_text("learner: admission paused").wait_for()
        await page.get_by_text("admission is paused: no new episodes are requested").wait_for()
        await shot(page, "10-paused-light")
        await page.get_by_role("button", name="resume admission").click()
        await page.get_by_text("learner: admission resumed").wait_for()
        await page.get_by_role("button", name="drain").click()
        await page.get_by_text("learner drains").wait_for()
        assert (paused, errors) == ([True, False], [])
        tasks.cancel_scope.cancel()


INTERACTIONS = {
    "open the episodes": ("location.hash = '#/episodes'", "section[aria-label=Episodes] tbody tr"),
    "sort by reward": ("document.querySelector('th:nth-child(3) button').click()", "th[aria-sort=ascending]"),
    "next page": ("document.querySelector('button[data-key=\"]\"]').click()", "form:has(button[data-key='[']:not(:disabled))"),
    "open the groups": ("location.hash = '#/groups'", ".pips"),
    "open the tasks": ("location.hash = '#/tasks'", "section[aria-label=Tasks] tbody tr"),
    "open the curves": ("location.hash = '#/curves'", "section[aria-label='Gradient norm, loss'] path"),
    "back to the overview": ("location.hash = '#/'", "section[aria-label=Outcomes]"),
}
TIMED = """async ([act, shown]) => {
  const began = performance.now();
  new Function(act)();
  while (!document.querySelector(`main ${shown}`)) await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""


async def test_interactions_with_ten_thousand_episodes_take_a_tenth_of_a_second() -> None:
    """From the act to what is drawn, the server's part included; the best of five, as the machine does other things too.

    A transcript is not among them: the log in memory, unlike the server's, is searched from end to end for it."""
    async with opened(10_000, "light") as (page, address, errors, _):
        await page.goto(address)
        await page.locator("section[aria-label=Outcomes]").wait_for()
        measured: dict[str, list[float]] = {name: [] for name in INTERACTIONS}
        for _ in range(5):
            for name, (act, shown) in INTERACTIONS.items():
                measured[name].append(await page.evaluate(TIMED, [act, shown]))
                await anyio.sleep(0.2)
        best = {name: round(min(times)) for name, times in measured.items()}
        print({name: f"{best[name]} ms, median {sorted(times)[2]:.0f}" for name, times in measured.items()})
        if max(best.values()) > 100 and os.getloadavg()[0] > (os.cpu_count() or 1):
            pytest.skip(f"the machine is busy with other things: {best}")
        assert max(best.values()) <= 100, measured
        assert errors == []


async def test_an_episode_leads_to_its_neighbours_and_is_compared_with_another_sample() -> None:
    async with opened(16, "dark") as (page, address, errors, _):
        await page.goto(f"{address}#/episode/e00014")
        await page.get_by_role("button", name="next").click()
        await page.get_by_role("heading", name="Episode e00015").wait_for()
        assert await page.get_by_role("button", name="next").is_disabled()
        await page.keyboard.press("[")
        await page.get_by_role("heading", name="Episode e00014").wait_for()
        await page.get_by_role("link", name="e00015").click()
        await page.get_by_text("Alike up to turn 0, token 19").wait_for()
        assert await page.locator("mark").count() == 2
        drawn = await page.locator("mark").first.evaluate(
            "m => [getComputedStyle(m).color, getComputedStyle(m).backgroundColor]"
        )
        assert drawn == ["rgb(28, 31, 37)", "rgb(240, 181, 74)"], "the token that differs stands out"
        await shot(page, "16-compare-dark")
        await page.keyboard.press("Escape")
        await page.get_by_role("heading", name="Episode e00014").wait_for()
        assert errors == []


async def test_the_reward_is_drawn_beside_another_runs_and_as_a_histogram(tmp_path: Path) -> None:
    curves = {"run": "first", "steps": [1, 2, 9], "reward_by_step": [0.1, 0.2, 0.9], "success_by_step": [None, 0.2, 0.3]}
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "summary.json").write_text(json.dumps(curves))
    async with opened(320, "light", str(tmp_path)) as (page, address, errors, _):
        await page.goto(f"{address}#/curves")
        await page.wait_for_function("() => fetch('/api/curves').then(r => r.json()).then(c => c.points.length === 20)")
        cells = page.locator("section[aria-label='Rewards of trained episodes'] rect")
        await cells.nth(39).wait_for()
        assert await cells.count() == 40, "twenty steps with two rewards each"
        assert await cells.first.locator("title").text_content() == (
            "steps 1 to 1: 10 of 16 episodes have a reward from 0.00 to 0.08"
        )
        reward = page.locator("section[aria-label='Reward and success']")
        assert await reward.locator(".legend li").count() == 4
        await reward.get_by_label("beside").select_option("first")
        await reward.get_by_text("reward of first").wait_for()
        assert "beside=first" in page.url
        assert await reward.locator("path.line").count() == 4
        await shot(page, "320-beside-light")
        async with page.expect_download() as saved:
            await reward.get_by_role("button", name="PNG").click()
        file = await saved.value
        assert file.suggested_filename == "reward-and-success.png"
        picture = await anyio.Path(await file.path()).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 4000, "more than an empty ground"
        await page.goto(f"{address}#/curves?beside=gone")
        await page.get_by_text("run gone has no summary that can be read").wait_for()
        assert len(errors) == 1 and "404" in errors.pop()


@pytest.mark.parametrize("view", ["", "curves", "groups", "episodes", "tasks", "runs", "evaluations", "episode/e00015"])
async def test_a_phone_shows_every_view_without_scrolling_sideways(view: str) -> None:
    async with opened(16, "light") as (page, address, errors, _):
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.goto(f"{address}#/{view}")
        await page.wait_for_selector("main section h2")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        assert errors == []


async def test_controls_have_names_and_text_stands_out() -> None:
    """Every control has an accessible name; text reaches a contrast of 4.5 in both themes."""
    async with opened(20, "light") as (page, address, errors, _):
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            for view in ("", "curves", "groups", "episodes"):
                await page.goto(f"{address}#/{view}")
                await page.wait_for_selector("main section")
                assert await page.evaluate(UNNAMED) == []
                assert await page.evaluate(PALE) == [], (scheme, view)
        assert errors == []


async def test_a_killed_worker_is_silent_on_the_page() -> None:
    async with opened(1, "light") as (page, address, errors, bus):
        await page.goto(address)
        beat = encode(Heartbeat(role="inference", worker="inference-9", slots=4, in_flight=1))
        await bus.publish(
            SUBJECTS.life("inference", "inference-9"), encode(WorkerStarted(role="inference", worker="inference-9"))
        )
        await bus.broadcast(SUBJECTS.heartbeat("inference", "inference-9"), beat)
        await page.wait_for_selector("td span.good:text('working')")
        killed = anyio.current_time()
        await page.wait_for_selector("td span.bad:text('silent')")
        print(f"shown as silent {anyio.current_time() - killed:.1f} s after the last heartbeat was shown")
        assert errors == []


UNNAMED = """() => [...document.querySelectorAll('a, button, input, select, svg')].filter(node =>
  !(node.getAttribute('aria-label') || node.textContent.trim() || node.closest('label')?.textContent.trim()))
  .map(node => node.outerHTML)"""

PALE = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = color => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data; };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const ground = node => { for (; node; node = node.parentElement) { const found = rgb(getComputedStyle(node).backgroundColor);
    if (found[3] > 250) return found; } return [255, 255, 255]; };
  const pale = [];
  for (const node of document.querySelectorAll('main *, header *, footer *')) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()) || node.closest('svg')) continue;
    const [one, other] = [light(rgb(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    if ((one + 0.05) / (other + 0.05) < 4.5) pale.push(node.outerHTML.slice(0, 80));
  }
  return pale;
}"""
