"""Texts of an episode as a reader wants them, in a headless Chromium: Markdown, diffs, what changed: `just test-browser`."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus.bus.base import Bus
from fleetbus_schemas import Action, ChatMessage, Observation, encode
from fleetbus_schemas.chat import ToolCall
from fleetbus_schemas.tokens import pack_ids, pack_logprobs
from fleetbus_workers.observe.monitor.text_search import TextSearch
from tests.support.browser_page import CHROMIUM, MARKUP, SUBJECTS, opened, shot

pytest.importorskip("starlette")
pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
    pytest.mark.filterwarnings("default"),
]

TASK = f"""# Repair {MARKUP}

Read **all** of `src/{MARKUP}`, [never](http://localhost:9/x) this; 2 * 3 ** 4 and a ` alone.
- first
  1. nested, numbered as it was said
- **second**

| file | lines |
|---|---:|
| `a.py` | {MARKUP} |

```python
# no heading
- no item
```
The end."""
DIFF = """diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
@@ -1,2 +1,3 @@ def f():
 kept
-old
+new
+newer
- not of the hunk"""
FILE = "\n".join(f"line {number}" for number in range(40))


async def play(bus: Bus, id: str) -> None:
    """Four turns: a file is read twice, and written twice, with a change between."""
    read, write = ToolCall(name="read", arguments={"path": "a.py"}), ToolCall(name="diff", arguments={})
    shown = [
        (ChatMessage(role="user", content=TASK),),
        (ChatMessage(role="tool", content=FILE),),
        (ChatMessage(role="tool", content=DIFF),),
        (ChatMessage(role="tool", content=FILE.replace("line 20", "line twenty")),),
    ]
    written = [ToolCall(name="write", arguments={"path": "a.py", "content": f"x\n{number}\n"}) for number in range(2)]
    made = [(read,), (write, written[0]), (read, written[1]), ()]
    for turn, (messages, calls) in enumerate(zip(shown, made, strict=True)):
        observation = Observation(
            episode_id=id, attempt=1, turn=turn, policy="default", tokens_left=9, environment_lane="e0", deadline_ns=0,
            messages=messages,
        )  # fmt: skip
        await bus.publish(SUBJECTS.observation("default", "any", id), encode(observation))
        action = Action(
            episode_id=id, attempt=1, turn=turn, text="It is **done**." if turn == 3 else "I go on.", tool_calls=calls,
            sampled=pack_ids([7, 8]), logprobs=pack_logprobs([-0.1, -2.0]),
        )  # fmt: skip
        await bus.publish(SUBJECTS.action("e0", id), encode(action))


async def open_episode(page: Any, address: str, bus: Bus) -> None:
    await play(bus, "e00001")
    await page.goto(f"{address}#/episode/e00001")
    await page.locator(".message.tool").nth(2).wait_for()


async def test_markdown_is_rendered_markup_in_it_stays_text_and_a_key_shows_it_as_it_was_sent() -> None:
    async with opened(8, "light") as (page, address, errors, bus):
        await open_episode(page, address, bus)
        task = page.locator(".message.user .markdown")
        assert await task.locator("h4").inner_text() == f"Repair {MARKUP}"
        assert await task.locator("strong").all_inner_texts() == ["all", "second"]
        assert await task.locator("p code").all_inner_texts() == [f"src/{MARKUP}"]
        assert "[never](http://localhost:9/x) this; 2 * 3 ** 4 and a ` alone." in await task.inner_text()
        assert await task.locator(".item").all_inner_texts() == ["•\nfirst", "1.\nnested, numbered as it was said", "•\nsecond"]
        assert await task.locator("td").all_inner_texts() == ["a.py", MARKUP]
        assert await task.locator("pre.code").inner_text() == "# no heading\n- no item"
        assert await page.locator("main img").count() == await task.locator("a").count() == 0
        last = page.locator(".message.assistant").nth(3)
        assert await last.locator(".markdown strong").inner_text() == "done"
        assert not await last.locator(".tokens .token").first.is_visible(), "the tokens are one click away"
        assert await page.locator(".message.assistant .tokens .token").first.is_visible(), "nothing to render: the tokens"
        await shot(page, "reading-episode-light")
        await page.keyboard.press("m")
        await page.get_by_role("button", name="show Markdown and diffs").wait_for()
        assert await page.locator(".message.user pre").inner_text() == TASK
        assert await last.locator(".tokens .token").first.is_visible()
        await page.reload()
        await page.locator(".message.tool").nth(2).wait_for()
        assert await page.locator(".markdown").count() == 0, "the choice stays"
        assert errors == []


async def test_diffs_are_colored_and_what_changed_since_the_same_call_is_shown() -> None:
    async with opened(8, "dark") as (page, address, errors, bus):
        await open_episode(page, address, bus)
        diff = page.locator(".message.tool").nth(1).locator("pre").first
        assert await diff.inner_text() == DIFF
        assert await diff.locator(".added").all_inner_texts() == ["+new", "+newer"]
        assert await diff.locator(".removed").all_inner_texts() == ["-old"], "not the line behind the hunk"
        again = page.get_by_text("changed since turn 1")
        assert await again.count() == 2, "what was read, and what was written"
        await page.locator(".message.tool").nth(2).get_by_text("changed since turn 1").click()
        changed = page.locator(".message.tool").nth(2).locator("details pre")
        context = [f" line {number}" for number in range(17, 24) if number != 20]
        expected = ["…", *context[:3], "-line 20", "+line twenty", *context[3:], "…"]
        assert (await changed.inner_text()).rstrip("\n").split("\n") == expected
        await shot(page, "changed-episode-dark")
        assert errors == []


async def test_a_text_that_is_made_to_stop_the_page_does_not() -> None:
    hostile = [
        "`" * 190_000, "**a" * 60_000, "|" * 190_000 + "\n|-|", "```\n" * 45_000, "- " * 90_000, "#" * 190_000, "[" * 190_000,
        "[" + "1," * 90_000 + "1]", "@@ -1 +1 @@\n" + "+\n" * 300_000,
        "~" * 190_000 + "x`", "# " + " " * 190_000 + "\u2028x", "- " + " " * 190_000 + "\rx",
    ]  # fmt: skip
    async with opened(8, "light") as (page, address, errors, bus):
        shown = Observation(
            episode_id="e00001", attempt=1, turn=0, policy="default", tokens_left=9, environment_lane="e0", deadline_ns=0,
            messages=(ChatMessage(role="user", content=MARKUP),),
        )  # fmt: skip
        await bus.publish(SUBJECTS.observation("default", "any", "e00001"), encode(shown))
        await page.goto(f"{address}#/episode/e00001")
        await page.locator(".message.user").wait_for()
        took = await page.evaluate(
            """async (texts) => {
                const { read } = await import("/page/content.js"), { between } = await import("/page/diff.js");
                return [...texts.map((text) => () => read(text)), () => between(texts[3], texts[3] + "x")].map((run) => {
                    const began = performance.now(); run(); return performance.now() - began;
                });
            }""",
            hostile,
        )
        assert max(took) < 5000, took
        assert errors == []


async def test_a_phone_shows_long_texts_without_scrolling_sideways() -> None:
    async with opened(8, "light") as (page, address, errors, bus):
        await page.set_viewport_size({"width": 390, "height": 844})
        await open_episode(page, address, bus)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await shot(page, "phone-episode-light")
        assert errors == []


async def test_what_is_found_grows_while_the_log_is_indexed_and_somebody_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = [0.25, 0.5, 0.75]

    async def compute_share(_search: TextSearch, _last_sequence: int) -> float:
        return shares.pop(0) if shares else 1.0

    monkeypatch.setattr(TextSearch, "compute_share", compute_share)
    async with opened(8, "light") as (page, address, errors, _):
        await page.goto(f"{address}#/episodes")
        await page.wait_for_selector("tr[tabindex]")
        await page.locator("input[name=said]").press_sequentially("brief")
        await page.get_by_text("of the log is indexed").wait_for()
        await page.get_by_text("of the log is indexed").wait_for(state="detached", timeout=20_000)
        assert await page.evaluate("document.activeElement.name") == "said"
        assert await page.input_value("input[name=said]") == "brief"
        assert errors == []
