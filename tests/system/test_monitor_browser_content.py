"""An episode on the page, in a headless Chromium: images, colours, arguments as a tree: `just test-browser`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fleetbus.bus.memory_bus import MemoryBus
from fleetbus_schemas import Action, AttemptStarted, ChatMessage, Observation, StepTrained, encode
from fleetbus_schemas.chat import Image, Text, ToolCall
from fleetbus_schemas.tokens import pack_ids
from fleetbus_workers.learner.base import SequenceTokens
from fleetbus_workers.learner.token_records import TokenRecords
from tests.support.browser_page import CHROMIUM, MARKUP, SUBJECTS, opened, shot
from tests.support.bucket import Bucket

pytest.importorskip("starlette")
pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
    pytest.mark.filterwarnings("default"),
]

SVG = f"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'>{MARKUP}</svg>".encode()


def draw_png() -> bytes:
    """A red picture of 8 x 8."""
    from io import BytesIO

    from PIL import Image as Picture

    file = BytesIO()
    Picture.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


async def test_images_are_drawn_and_what_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    png = draw_png()
    names = [hashlib.sha256(content).hexdigest() for content in (png, SVG)]
    bucket = Bucket(dict(zip(names, (png, SVG), strict=True)))
    monkeypatch.setattr(MemoryBus, "objects", lambda self, name: bucket)
    async with opened(8, "light") as (page, address, errors, bus):
        parts: tuple[Text | Image, ...] = (
            Text(text="look \x1b[31mred\x1b[0m \x1b]0;title\x07end"),
            *(Image(object=each, width=8, height=8) for each in names),
        )
        shown = Observation(
            episode_id="e00001", attempt=1, turn=0, policy="default", tokens_left=9, environment_lane="e0", deadline_ns=0,
            messages=(ChatMessage(role="user", content=parts),),
        )  # fmt: skip
        await bus.publish(SUBJECTS.observation("default", "any", "e00001"), encode(shown))
        call = ToolCall(name="write", arguments={"path": MARKUP, "lines": ["a" * 90, {"deep": [1, None]}]})
        short = ToolCall(name="ls", arguments={"path": "."})
        action = Action(episode_id="e00001", attempt=1, turn=0, text="I look.", tool_calls=(call, short), sampled=pack_ids([7]))
        await bus.publish(SUBJECTS.action("e0", "e00001"), encode(action))
        await page.goto(f"{address}#/episode/e00001")
        await page.get_by_text("not to be shown").wait_for()
        assert await page.locator("main img").count() == 1
        assert await page.locator("main img").evaluate("image => [image.naturalWidth, image.complete]") == [8, True]
        words = (await page.locator(".message.user pre").inner_text()).split()
        assert " ".join(words) == f"look red end [Image {names[1][:12]}: not to be shown]"
        assert await page.locator(".message.user .ansi1").inner_text() == "red"
        assert await page.locator("details.tree").count() == 1 and MARKUP in await page.locator("details.tree").inner_text()
        await page.locator("details.tree summary", has_text="lines: [2]").click()
        assert "aaaa" in await page.locator("details.tree").inner_text()
        assert '→ ls({"path":"."})' in await page.inner_text("main")
        await shot(page, "content-episode-light")
        assert [error for error in errors if "415" not in error] == []


async def test_the_trainers_log_probability_is_beside_the_samplers_and_tokens_that_differ_stand_out(tmp_path: Path) -> None:
    sampled = 20
    values = np.array([-index / 5 for index in range(sampled)], np.float32)
    values[[3, 17]] += 0.5
    tokens = SequenceTokens(
        episode_id="e00007",
        places=np.arange(5, 5 + sampled),
        logprobs=values,
        gradients=np.full(sampled, -0.25, np.float32),
        clipped=np.arange(sampled) == 3,
    )
    digest = TokenRecords(tmp_path / "page" / "tokens", keep=5).write("a", 99, [tokens], version=98)
    async with opened(8, "light", str(tmp_path)) as (page, address, errors, bus):
        await page.goto(f"{address}#/episode/e00006")
        await page.wait_for_selector(".token")
        assert "tokens trained" not in await page.inner_text("main"), "no record"
        step = StepTrained(lineage="a", step=99, version=99, episodes=("e00007",), token_record=digest)
        await bus.publish(SUBJECTS.train("default"), encode(step))
        await page.goto(f"{address}#/episode/e00007")
        await page.get_by_text(
            "20 tokens trained; the log-probabilities of sampler and trainer differ by 0.500 at most"
        ).wait_for()
        assert await page.locator(".token.differs").count() == 2
        about = await page.locator(".token.differs").first.get_attribute("title")
        assert about == ("id 13, log-probability -0.600 (54.9 %)\ntrainer -0.100, +0.500 to the sampler\nclipped (-2.5e-1)")
        await shot(page, "trainer-episode-light")
        assert errors == []


async def test_a_turn_that_another_worker_continued_from_is_told_between_the_turns() -> None:
    async with opened(8, "light") as (page, address, errors, bus):
        for attempt, turn in ((2, 0), (3, 1)):
            claim = AttemptStarted(
                episode_id="e00007", attempt=attempt, worker=f"environment-{attempt}", nonce=MARKUP, lane="e0",
                resumed_at_turn=turn, reason="taken_over",
            )  # fmt: skip
            await bus.publish(SUBJECTS.episode("e00007"), encode(claim))
        action = Action(episode_id="e00007", attempt=2, turn=0, text="again", sampled=pack_ids([7]))
        await bus.publish(SUBJECTS.action("e0", "e00007"), encode(action))
        await page.goto(f"{address}#/episode/e00007")
        await page.locator(".takeover").nth(1).wait_for()
        assert await page.locator(".takeover").all_inner_texts() == [
            "attempt 2: environment-2 continues from turn 0 (taken over)",
            "attempt 3: environment-3 continues after the last turn (taken over)",
        ]
        assert errors == []


async def test_the_first_view_has_the_diagnosis(tmp_path: Path) -> None:
    async with opened(64, "light", str(tmp_path)) as (page, address, errors, _):
        await page.goto(address)
        shown = await page.wait_for_selector("section[aria-label=Diagnosis]")
        assert "steps 1 to 4" in await shown.inner_text()
        assert errors == []
