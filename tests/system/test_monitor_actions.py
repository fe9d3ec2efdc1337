"""Actions of the page upon a run: behind its key alone, as JSON, from its own origin; by the code of the commands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, LimitSettings, NatsSettings, RunSettings
from fleetbus.delivery.control import Control
from fleetbus.errors import UserError
from fleetbus_schemas import EpisodeRequested, Subjects, Task, encode
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fleetbus_workers.observe.monitor.actions import OpenBus
from fleetbus_workers.observe.monitor.serve import serve
from fleetbus_workers.serving.listeners import bind

RUN, KEY = "acts", "theKeyOfThePage"
SUBJECTS = Subjects(RUN)
CONFIGURATION = Configuration(
    run=RunSettings(name=RUN), nats=NatsSettings(lanes=2), limits=LimitSettings(late=0.2, drain=0.1, close=1)
)


class Served:
    """A page with actions, and two clients of it: one with its cookie, one without."""

    def __init__(self, server: MemoryServer, browser: httpx.AsyncClient, stranger: httpx.AsyncClient, bus: Bus) -> None:
        self.server, self.browser, self.stranger, self.bus = server, browser, stranger, bus

    async def act(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.browser.post(f"/api/actions/{path}", json=body, headers=headers)


@asynccontextmanager
async def served(*, key: str = KEY, open_operator: OpenBus | None = None, acts: bool = True) -> AsyncIterator[Served]:
    server, stop, ready = MemoryServer(), anyio.Event(), anyio.Event()
    addresses: list[str] = []

    def announce(address: str) -> None:
        addresses.append(address)
        ready.set()

    with anyio.fail_after(60), bind("127.0.0.1", 0) as bound:
        async with server.connect(RUN, worker="test") as bus, anyio.create_task_group() as tasks:
            await bus.declare(plan_run(RUN, lanes=2))
            operator = open_operator or (lambda: server.connect(RUN, worker="page"))

            async def run() -> None:
                async with server.connect(RUN, worker="monitor") as watching:
                    await serve(
                        watching, CONFIGURATION, host="127.0.0.1", bound=bound, stop=stop, on_ready=announce, key=key,
                        open_operator=operator if acts else None,
                    )  # fmt: skip

            tasks.start_soon(run)
            await ready.wait()
            base = addresses[0].partition("?")[0]
            async with (
                httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as browser,
                httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as stranger,
            ):
                await browser.get("/", params={"key": key} if key else None)
                yield Served(server, browser, stranger, bus)
            stop.set()


async def request(bus: Bus, episode: str) -> None:
    message = EpisodeRequested(
        episode_id=episode, group_id="g", sample_index=0, split="train", task=Task(key="k"), policy="default",
        deadline_ns=bus.now_ns() + 60 * 10**9,
    )  # fmt: skip
    await bus.publish(SUBJECTS.task("default", episode), encode(message), expected_last=0)


async def test_episodes_are_cancelled_and_workers_drained_as_by_the_commands() -> None:
    async with served() as page, anyio.create_task_group() as tasks:

        async def play() -> None:
            async with page.server.connect(RUN, worker="environment-0") as bus:
                await run_environment(
                    bus, configuration=CONFIGURATION, name="environment-0", drain=anyio.Event(), make=ScriptedEnvironment
                )

        tasks.start_soon(play)
        await request(page.bus, "a")
        async with page.bus.read([SUBJECTS.observation("default", "any", "a")]) as reader:
            await reader.receive()
        shown = (await page.browser.get("/api/episodes/a")).json()
        assert (shown["actions"], shown["result"]) == (True, None)
        done = (await page.act("cancel", {"episodes": ["a", "never", "a"]})).json()
        assert [(each["episode_id"], each["state"]) for each in done] == [
            ("a", "cancelled"),
            ("never", "unknown"),
            ("a", "cancelled"),
        ]
        assert (await page.act("drain", {"workers": ["environment-0", "nobody"]})).json() == {
            "environment-0": "environment",
            "nobody": "unknown",
        }  # and the worker ends, or the group of tasks would not


async def test_admission_is_paused_and_resumed_and_without_a_learner_that_is_said() -> None:
    paused: list[bool] = []
    async with served() as page, anyio.create_task_group() as tasks:
        assert (await page.act("pause", {"paused": True})).json() == {"learner": None}
        async with page.server.connect(RUN, worker="learner-0") as bus:
            control = Control(
                bus, SUBJECTS, role="learner", worker="learner-0", drain=anyio.Event(), cancel=lambda episodes, author: (),
                busy_with=lambda: (), pause=paused.append,
            )  # fmt: skip
            tasks.start_soon(control.run)
            await anyio.wait_all_tasks_blocked()
            for wanted in (True, False):
                assert (await page.act("pause", {"paused": wanted})).json() == {"learner": "learner-0"}
            assert paused == [True, False]
            tasks.cancel_scope.cancel()


async def test_episodes_are_labelled_found_by_it_and_shown_with_who_said_so() -> None:
    async with served() as page:
        await request(page.bus, "a")
        await request(page.bus, "b")
        done = (await page.act("label", {"episode": "a", "add": ["good"], "comment": " =1+1 <b> "})).json()
        assert [each["name"] for each in done["labels"]] == ["good"] and done["labels"][0]["author"] == "page"
        number = done["comments"][0]["sequence"]
        await page.act("label", {"episode": "a", "turn": 1, "add": ["odd"], "author": "Ada"})
        shown = (await page.browser.get("/api/episodes/a")).json()
        assert [(each["name"], each.get("turn")) for each in shown["labels"]] == [("good", None), ("odd", 1)]
        assert shown["labels"][1]["author"] == "Ada"
        assert [each["text"] for each in shown["comments"]] == ["=1+1 <b>"]
        with anyio.fail_after(20):
            found = {"total": 0}
            while found["total"] != 1:
                found = (await page.browser.get("/api/episodes", params={"label": "odd"})).json()
        assert found["rows"][0]["labels"] == ["good", "odd"]  # type: ignore[index]
        assert "'=1+1 <b>" in (await page.browser.get("/api/episodes", params={"format": "csv"})).text
        done = (await page.act("label", {"episode": "a", "replaces": number, "remove": ["good"]})).json()
        assert ([each["name"] for each in done["labels"]], done["comments"]) == (["odd"], [])
        for refused in ({"add": ["two words"]}, {"replaces": 999_999}, {"comment": "x" * 2_001}, {"add": ["n"] * 33}):
            answer = await page.act("label", {"episode": "a", **refused})
            assert answer.status_code == 400 and "\n" not in answer.text
        assert (await page.act("label", {"episode": "none", "add": ["good"]})).status_code == 400


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "text/plain"}, b'{"paused": true}', 415),
        ({"content-type": "application/x-www-form-urlencoded"}, b"paused=true", 415),
        ({}, b'{"paused": true}', 415),
        ({"content-type": "application/json", "origin": "http://evil.example"}, b'{"paused": true}', 403),
        ({"content-type": "application/json", "origin": "http://127.0.0.1:1"}, b'{"paused": true}', 403),
        ({"content-type": "application/json", "origin": "null"}, b'{"paused": true}', 403),
        ({"content-type": "application/json", "sec-fetch-site": "cross-site"}, b'{"paused": true}', 403),
        ({"content-type": "application/json", "host": "evil.example"}, b'{"paused": true}', 400),
        ({"content-type": "application/json"}, b'{"paused": "yes"}', 400),
        ({"content-type": "application/json"}, b'{"paused": true, "more": 1}', 400),
        ({"content-type": "application/json"}, b"{", 400),
        ({"content-type": "application/json"}, b" " * 70_000, 413),
    ],
)
async def test_a_page_of_another_origin_and_what_is_no_such_request_does_nothing(
    headers: dict[str, str], content: bytes, status: int
) -> None:
    opened: list[str] = []

    def open_operator() -> Any:
        opened.append("once")
        raise UserError("never opened")

    async with served(open_operator=open_operator) as page:
        answer = await page.browser.post("/api/actions/pause", content=content, headers=headers)
        assert (answer.status_code, opened) == (status, [])


async def test_without_the_key_nothing_is_done_and_a_page_without_a_key_has_no_actions() -> None:
    async with served() as page:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": f"fleetbus-1={KEY}"}):
            refused = await page.stranger.post("/api/actions/pause", json={"paused": True}, headers=headers)
            assert refused.status_code == 401
        by_program = {"authorization": f"Bearer {KEY}"}
        assert (await page.stranger.post("/api/actions/pause", json={"paused": True}, headers=by_program)).status_code == 200
        assert (await page.browser.get("/api/actions/pause")).status_code == 405
        assert "frame-ancestors 'none'" in (await page.browser.get("/")).headers["content-security-policy"]
    for options in ({"key": ""}, {"acts": False}):
        async with served(**options) as page:  # type: ignore[arg-type]
            assert (await page.act("pause", {"paused": True})).status_code == 404
            assert (await page.browser.get("/api/overview")).json()["actions"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [("cancel", {"episodes": ["no.name"]}), ("drain", {"workers": ["a b"]}), ("drain", {"workers": []})],
)
async def test_names_that_cannot_be_are_refused(path: str, body: Any) -> None:
    async with served() as page:
        assert (await page.act(path, body)).status_code == 400


async def test_a_run_that_cannot_be_reached_is_said_and_the_key_is_in_no_log_line(capfd: pytest.CaptureFixture[str]) -> None:
    @asynccontextmanager
    async def open_operator() -> AsyncIterator[Bus]:
        async with MemoryServer().connect(RUN, worker="page") as bus, anyio.create_task_group():
            if bus is not None:
                raise UserError("no server of run acts is running here")
            yield bus

    async with served(open_operator=open_operator) as page:
        answer = await page.act("pause", {"paused": True})
        assert (answer.status_code, answer.text) == (503, "not done: no server of run acts is running here")
    out, err = capfd.readouterr()
    assert "acting for the page" in out + err and KEY not in out + err


async def test_what_a_comment_says_is_in_no_log_line(capfd: pytest.CaptureFixture[str]) -> None:
    async with served() as page:
        await request(page.bus, "a")
        assert (await page.act("label", {"episode": "a", "comment": "between us"})).status_code == 200
    out, err = capfd.readouterr()
    assert "acting for the page" in out + err and "between us" not in out + err


async def test_the_page_shows_what_was_done_to_the_run() -> None:
    async with served() as page:
        assert (await page.act("pause", {"paused": True})).json() == {"learner": None}
        assert (await page.act("drain", {"workers": ["w1", "w2"]})).status_code == 200
        found: list[dict[str, Any]] = []
        async with page.browser.stream("GET", "/api/events") as events:
            async for line in events.aiter_lines():
                found = json.loads(line.removeprefix("data: ")).get("operations", []) if line.startswith("data: ") else found
                if len(found) == 2:
                    break
        assert [(each["operation"], each["role"], each["author"]) for each in found] == [
            ("pause", "operator", "page"), ("drain", "operator", "page"),
        ]  # fmt: skip
        assert found[1]["targets"] == ["w1", "w2"] and "without a key drain w1 w2 (says page)" in found[1]["line"]
