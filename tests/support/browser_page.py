"""The page of a run in a headless Chromium: a run as the roles would have written it, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    Observation,
    StepTrained,
    Subjects,
    Task,
    encode,
)
from fleetbus_schemas.action import VersionSpan
from fleetbus_schemas.tokens import pack_ids, pack_logprobs

if TYPE_CHECKING:
    from fleetbus_workers.observe.monitor.compared_evaluations import OpenRun

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RUN = "page"
SUBJECTS = Subjects(RUN)
GROUP = 8
MARKUP = "<img src=x onerror=alert(1)>"


async def fill(bus: Bus, episodes: int) -> None:
    """A run as the roles would have written it: groups of eight, a training step per two groups, one failure in fifty."""
    train = SUBJECTS.train("default")
    await bus.publish(train, encode(LineageStarted(lineage="a", worker="learner")))
    trained: list[str] = []
    for index in range(episodes):
        id, group = f"e{index:05}", f"g{index // GROUP:05}"
        task = Task(key=f"task-{index // GROUP}", prompt=MARKUP)
        request = EpisodeRequested(
            episode_id=id, group_id=group, sample_index=index % GROUP, split="train", task=task, policy="default", deadline_ns=0
        )
        await bus.publish(SUBJECTS.task("default", id), encode(request))
        await bus.publish(
            SUBJECTS.episode(id), encode(AttemptStarted(episode_id=id, attempt=1, worker="environment-1", nonce="n", lane="e0"))
        )
        if index >= episodes - 2:
            await turns(bus, id)
        failed = index % 50 == 49
        finished = EpisodeFinished(
            episode_id=id, group_id=group, attempt=1, outcome="env_failed" if failed else "completed", worker="environment-1",
            task_key=task.key, reward=None if failed else float(index % 3 == 0), turns=2, tokens=120,
            policy_versions=(index // 16,), error_class="ConnectionError" if failed else "", timings={"verify": 0.01},
        )  # fmt: skip
        await bus.publish(SUBJECTS.episode(id), encode(finished))
        trained.append(id)
        if len(trained) == 2 * GROUP:
            await step(bus, index // (2 * GROUP) + 1, trained)
            trained = []


async def step(bus: Bus, number: int, episodes: list[str]) -> None:
    share = 1 - 1 / (1 + number / 100)
    metrics = {
        "reward": share, "success": share * 0.9, "staleness_max": float(number % 3), "staleness_mean": (number % 3) / 2,
        "seconds_wait": 0.4, "seconds_read": 0.02, "seconds_train": 0.3 + 0.1 * (number % 5), "grad_norm": 1.0, "loss": -0.01,
        "turns": 2.5, "tokens": 1900.0,
    }  # fmt: skip
    trained = StepTrained(lineage="a", step=number, version=number, episodes=tuple(episodes), metrics=metrics)
    await bus.publish(SUBJECTS.train("default"), encode(trained))
    if number % 100 == 1:
        evaluated = EvaluationFinished(
            lineage="a",
            step=number,
            version=number,
            name="x",
            episodes=8,
            graded=8,
            success=share,
            mean_reward=share,
            temperature=1.0,
        )
        await bus.publish(SUBJECTS.train("default"), encode(evaluated))


async def turns(bus: Bus, id: str) -> None:
    """One turn; the last sampled token is another one in every episode."""
    observation = Observation(
        episode_id=id, attempt=1, turn=0, policy="default", tokens_left=100, environment_lane="e0", deadline_ns=0,
        messages=(ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=MARKUP)),
    )  # fmt: skip
    await bus.publish(SUBJECTS.observation("default", "any", id), encode(observation))
    ids = [*range(10, 29), 100 + int(id[1:])]
    action = Action(
        episode_id=id, attempt=1, turn=0, text=MARKUP, prompt_delta=pack_ids(range(5)), sampled=pack_ids(ids),
        worker="inference-1", logprobs=pack_logprobs([-index / 5 for index in range(len(ids))]),
        versions=(VersionSpan(version=3, start=0, stop=20),), seconds_queued=0.001, seconds_generating=0.002,
    )  # fmt: skip
    await bus.publish(SUBJECTS.action("e0", id), encode(action))


@asynccontextmanager
async def opened(
    episodes: int, scheme: str, folder: str = RunSettings().folder, *, acts: bool = False, open_other: OpenRun | None = None
) -> AsyncIterator[tuple[Any, str, list[str], Bus]]:
    """A browser page on a run with so many episodes; ``errors`` collects what its console complains of. A page that ``acts``
    has a key, and every question of it is answered with yes."""
    from playwright import async_api as playwright

    from tests.support.monitor_page import serve_run_page

    server = MemoryServer()
    async with server.connect(RUN, worker="test") as bus, playwright.async_playwright() as started:
        await bus.declare(plan_run(RUN, lanes=2))
        await fill(bus, episodes)
        configuration = Configuration(run=RunSettings(name=RUN, folder=folder))
        async with (
            server.connect(RUN, worker="monitor") as watching,
            serve_run_page(
                watching,
                configuration,
                key="theKey" if acts else "",
                open_operator=(lambda: server.connect(RUN, worker="page")) if acts else None,
                open_other=open_other,
            ) as address,
        ):
            browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            try:
                context = await browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
                context.set_default_timeout(60_000)
                page, errors = await context.new_page(), []
                page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.on("dialog", lambda dialog: dialog.accept() if acts else errors.append("a dialog opened"))
                own = (address.partition("?")[0], "data:")
                page.on("request", lambda sent: errors.append(sent.url) if not sent.url.startswith(own) else None)
                yield page, address, errors, bus
            finally:
                await browser.close()


async def shot(page: Any, name: str) -> None:
    if folder := os.environ.get("MONITOR_SCREENSHOTS"):
        await page.screenshot(path=Path(folder) / f"{name}.png", full_page="episode" in name)
