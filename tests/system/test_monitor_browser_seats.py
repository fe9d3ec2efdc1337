"""The page of a run with several seats and policies, in a headless Chromium."""

from __future__ import annotations

import pytest

from fleetbus_schemas import LineageStarted, StepTrained, encode
from tests.support import interchange_run
from tests.support.browser_page import CHROMIUM, SUBJECTS, opened, shot

pytest.importorskip("starlette")
pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
    pytest.mark.filterwarnings("default"),
]


async def test_the_curves_of_each_policy_are_drawn_and_one_is_chosen() -> None:
    async with opened(32, "light") as (page, address, errors, bus):
        train = SUBJECTS.train("solver")
        joins = LineageStarted(lineage="a", worker="l", settings={"learner": {"requested_by": "default"}})
        await bus.publish(train, encode(joins))
        for number in (1, 2, 3):
            metrics = {"reward": 0.9, "reward_of_solver": number / 4, "grad_norm": 7.0 + number}
            await bus.publish(
                train, encode(StepTrained(lineage="a", step=number, version=number, episodes=(), metrics=metrics))
            )
        await page.goto(f"{address}#/curves")
        legend = page.locator("section[aria-label='Reward and success'] .legend")
        await legend.get_by_text("reward of solver 0.75").wait_for()
        assert "reward of default" in await legend.inner_text()
        await page.select_option("select[name='policy']", "solver")
        norm = page.locator("section[aria-label='solver: Gradient norm, loss'] .legend")
        assert "gradient norm 10.000" in await norm.inner_text()
        await page.goto(address)
        await page.locator(".legend").get_by_text("reward of solver 0.75").wait_for()
        await shot(page, "policies-light")
        assert errors == []


async def test_each_seat_has_a_lane_with_its_policy_and_its_reward() -> None:
    game = interchange_run.ExchangeRun()
    interchange_run.play_game(game, "game")
    async with opened(0, "light") as (page, address, errors, bus):
        for entry in game.entries:
            await bus.publish(entry.subject.replace(interchange_run.SUBJECTS.run, SUBJECTS.run), entry.payload)
        await page.goto(f"{address}#/episode/game")
        listed = page.locator("ul[aria-label='Seats'] li")
        await listed.first.wait_for()
        assert [text.partition(" · 1 turns")[0] for text in await listed.all_inner_texts()] == [
            "proposer · policy default · reward 0.250 · 2 turns",
            "solver · policy solver · reward 0.750 · 2 turns",
            "judge · policy frozen-judge · no reward: the policy frozen-judge plays it, which is not trained here",
        ]
        titles = await page.locator(".message.assistant h3").all_inner_texts()
        assert [title.split(" · ")[1:3] for title in titles] == [
            ["turn 0", "proposer (default)"], ["turn 1", "solver"], ["turn 2", "judge (frozen-judge)"], ["turn 3", "solver"],
            ["turn 4", "proposer (default)"],
        ]  # fmt: skip
        places = [(await page.locator(f".message.user[data-turn='{turn}']").bounding_box())["x"] for turn in (0, 1, 2, 3, 4)]
        assert places[0] == places[4] < places[1] == places[3] < places[2]
        await shot(page, "lanes-episode-light")
        assert errors == []
