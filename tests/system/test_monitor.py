"""`fleetbus monitor` over HTTP: its files, its live events, its tables, one episode; and the command as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.nats import connect as connect_openly
from fleetbus.bus.nats.server import run_server as run_open_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import (
    Action,
    ContextChange,
    EpisodeFinished,
    EpisodeRequested,
    Heartbeat,
    LineageStarted,
    PolicyPublished,
    StepTrained,
    Subjects,
    Task,
    WorkerStarted,
    encode,
)
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Environment, Step
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from tests.support.servers import connect, run_server
from tests.support.small_deployment import LANES, RUN, build_configuration

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fleetbus_workers.observe.run.nats_http import HOW
from fleetbus_workers.observe.run.watchdog import find_notes, find_stalls
from fleetbus_workers.serving.listeners import bind
from tests.support.monitor_page import open_empty_run, open_page

pytestmark = pytest.mark.integration

SUBJECTS = Subjects(RUN)
PAGE_FILES = [*(Path(__file__).parents[2] / "workers/fleetbus_workers/observe/monitor/page").iterdir()]


async def test_the_page_and_its_files_come_from_here_alone() -> None:
    with anyio.fail_after(50):
        async with open_empty_run() as (page, _):
            answer = await page.client.get("/")
            assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
            wanted = re.findall(r'(?:href|src)="(/page/[^"]+)"', answer.text)
            files = {f"/page/{file.name}" for file in PAGE_FILES}
            assert set(wanted) < files
            for file in files:
                assert (await page.client.get(file)).status_code == 200
    texts = "".join(file.read_text() for file in PAGE_FILES).replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"^\s*(//|/\*\*).*$", "", texts, flags=re.MULTILINE)
    assert "innerHTML" not in texts


async def test_a_run_without_anything_is_shown_as_empty() -> None:
    with anyio.fail_after(50):
        async with open_empty_run() as (page, _):
            overview = await page.get("/api/overview")
            assert (overview["run"], overview["workers"], overview["numbers"]["requested"]) == (RUN, [], 0)
            assert await page.get("/api/curves") == {
                "policy": "", "start": 0, "points": [], "evaluations": [], "others": {},
            }  # fmt: skip
            assert (await page.get("/api/episodes"))["total"] == 0
            assert (await page.get("/api/groups"))["rows"] == []
            assert (await page.client.get("/api/episodes/none")).status_code == 404
            assert (await page.client.get("/api/episodes/no.name")).status_code == 400


async def test_curves_of_other_runs_are_those_of_their_summaries(tmp_path: Path) -> None:
    curves = {"run": "first", "steps": [1, 2], "reward_by_step": [0.25, None], "success_by_step": [0.0, 0.5]}
    for run, text in {"first": json.dumps(curves | {"wall_seconds": 1}), "broken": "{", RUN: json.dumps(curves)}.items():
        (tmp_path / run).mkdir()
        (tmp_path / run / "summary.json").write_text(text)
    (tmp_path / "unfinished").mkdir()
    with anyio.fail_after(50):
        async with open_empty_run(str(tmp_path)) as (page, _):
            assert await page.get("/api/runs") == ["broken", "first"]
            assert (await page.get("/api/runs/first")).items() >= (curves | {"wall_seconds": 1.0, "success_end": None}).items()
            for run, status in {"broken": 404, "unfinished": 404, "no.name": 400, "..": 404, "..%2Ffirst": 404}.items():
                assert (await page.client.get(f"/api/runs/{run}")).status_code == status, run
            assert (await page.get("/api/rewards"))["counts"] == []


async def test_an_episode_of_values_that_json_has_not_is_shown() -> None:
    odd = EpisodeFinished(
        episode_id="odd", group_id="g", attempt=1, outcome="completed", worker="e", reward=float("nan"),
        timings={"verify": float("inf")}, info={"cells": {(1, 2): 3}},
    )  # fmt: skip
    with anyio.fail_after(50):
        async with open_empty_run() as (page, bus):
            await bus.publish(SUBJECTS.episode("odd"), encode(odd))
            result = (await page.get("/api/episodes/odd"))["result"]
            assert (result["reward"], result["info"]) == (None, {"cells": {"(1, 2)": 3}})


async def test_what_holds_a_run_is_said_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.observe.monitor.app.find_stalls", partial(find_stalls, stall_seconds=0.001))
    with anyio.fail_after(50):
        async with open_empty_run() as (page, bus), page.events() as events:
            assert (await page.get("/api/overview"))["stalls"] == []
            await bus.publish(SUBJECTS.train("default"), encode(LineageStarted(lineage="a", worker="l")))
            async for name, facts in events:
                if name == "overview" and facts["stalls"]:
                    break
    (stall,) = facts["stalls"]
    assert stall["where"] == "learner" and stall["line"].startswith("stuck at the learner for ")


def step_of(number: int, success: float) -> StepTrained:
    """Sixteen groups of eight, the rewards of each of them equal."""
    metrics = {"success": success, "reward": success, "groups_without_signal": 16.0, "advantage_size_mean": 0.0}
    episodes = tuple(f"e{number}-{index}" for index in range(128))
    return StepTrained(lineage="a", step=number, version=number, episodes=episodes, metrics=metrics)


@pytest.mark.parametrize(("success", "kind"), [(0.0, "stalls"), (1.0, "notes")])
async def test_a_run_of_which_nothing_is_learned_is_an_alarm_and_a_solved_one_a_note(
    success: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbus_workers.observe.monitor.app.find_stalls", partial(find_stalls, stall_seconds=0.001))
    monkeypatch.setattr("fleetbus_workers.observe.monitor.app.find_notes", partial(find_notes, patience_seconds=0.001))
    with anyio.fail_after(50):
        async with open_empty_run() as (page, bus), page.events() as events:
            await bus.publish(SUBJECTS.train("default"), encode(LineageStarted(lineage="a", worker="l")))
            for number in range(1, 6):
                await bus.publish(SUBJECTS.train("default"), encode(step_of(number, success)))
            async for name, facts in events:
                if name == "overview" and facts["numbers"]["step"] == 5 and (facts["notes"] or facts["stalls"]):
                    break
    told = [stall["line"] for stall in facts["stalls"] if stall["where"] == "policy"]
    assert (len(told), len(facts["notes"])) == ((1, 0) if kind == "stalls" else (0, 1))
    assert "the last 80 groups had equal rewards each" in [*told, *facts["notes"]][0]


async def test_the_nats_server_is_shown_with_who_is_connected_and_without_it_how_to_turn_that_on(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with (
            run_open_server(tmp_path) as server,
            connect_openly(server.url, run=RUN, role="monitor", worker="looker") as bus,
        ):
            await bus.declare(plan_run(RUN, lanes=2))
            async with open_page(bus, server.monitor_url) as page, page.events() as events:
                shown = await anext(
                    facts["server"] async for name, facts in events if name == "overview" and facts["server"]["version"]
                )
            assert [client["worker"] for client in shown["clients"]] == ["looker"] and shown["slow_consumers"] == 0
            assert {each["kind"] for each in shown["consumers"]} == {"task", "obs", "act"}
            async with open_page(bus, "") as page, page.events() as events:
                shown = await anext(
                    facts["server"] async for name, facts in events if name == "overview" and facts["server"]["hint"]
                )
    assert shown["hint"] == HOW and shown["connections"] is None and shown["consumers"]


async def test_another_sites_name_for_this_machine_is_refused() -> None:
    """A page elsewhere whose name points here must not read what is served here."""
    with anyio.fail_after(50):
        async with open_empty_run() as (page, _):
            answer = await page.client.get("/api/overview", headers={"host": "evil.example"})
    assert answer.status_code == 400


async def test_events_bring_new_points_once_and_workers_as_they_come_and_fall_silent() -> None:
    train = SUBJECTS.train("default")

    def step(number: int) -> bytes:
        return encode(StepTrained(lineage="a", step=number, version=number, episodes=(), metrics={"reward": 0.5}))

    with anyio.fail_after(50):
        async with open_empty_run() as (page, bus):
            await bus.publish(train, encode(LineageStarted(lineage="a", worker="l")))
            await bus.publish(train, step(1))
            async with page.events() as events:
                drawn: list[dict[str, Any]] = []
                async for name, facts in events:
                    if name == "curves":
                        drawn[facts["start"] :] = facts["points"]
                    if [point["step"] for point in drawn] == [1]:
                        break
                await bus.publish(train, step(2))
                beat = Heartbeat(role="environment", worker="e-1", slots=4, in_flight=2)
                await bus.publish(SUBJECTS.life("environment", "e-1"), encode(WorkerStarted(role="environment", worker="e-1")))
                await bus.broadcast(SUBJECTS.heartbeat("environment", "e-1"), encode(beat))
                states: list[str] = []
                async for name, facts in events:
                    if name == "curves":
                        assert facts["start"] == 1
                        drawn[facts["start"] :] = facts["points"]
                    elif facts["workers"]:
                        states.append(facts["workers"][0]["state"])
                    if states and states[-1] == "silent":
                        break
    assert [point["step"] for point in drawn] == [1, 2]
    assert "working" in states


@asynccontextmanager
async def played(episodes: int, make: Callable[[], Environment] = ScriptedEnvironment) -> AsyncIterator[MemoryServer]:
    """A run in which one environment worker and one inference worker have played so many episodes, and are still there."""
    server, drain = MemoryServer(), anyio.Event()
    configuration = build_configuration()
    async with (
        server.connect(RUN, worker="test") as bus,
        server.connect(RUN, worker="environment-0") as first,
        server.connect(RUN, worker="inference-0") as second,
    ):
        await bus.declare(plan_run(RUN, lanes=LANES))
        published = PolicyPublished(policy="default", version=0, lineage="a", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(SUBJECTS.policy("default"), encode(published))
        play = partial(run_environment, first, configuration=configuration, name="environment-0", drain=drain)
        sample = partial(run_inference, second, configuration=configuration, name="inference-0", drain=drain)
        async with anyio.create_task_group() as workers:
            workers.start_soon(partial(play, make=make))
            workers.start_soon(partial(sample, sampler=ScriptedSampler(), template=ScriptedTemplate()))
            for number in range(episodes):
                request = EpisodeRequested(
                    episode_id=f"e{number}",
                    group_id="g",
                    sample_index=number,
                    split="train",
                    task=Task(key="t"),
                    policy="default",
                    deadline_ns=bus.now_ns() + 60 * 10**9,
                )
                await bus.publish(SUBJECTS.task("default", f"e{number}"), encode(request))
            async with bus.read([SUBJECTS.episodes]) as reader:
                finished = 0
                while finished < episodes:
                    finished += isinstance(decode_episode_entry(await reader.receive()), EpisodeFinished)
            yield server
            drain.set()


async def test_episodes_are_listed_filtered_and_shown_token_by_token() -> None:
    with anyio.fail_after(50):
        async with played(5) as server, server.connect(RUN, worker="monitor") as watching, open_page(watching) as page:
            while (await page.get("/api/episodes", state="completed"))["total"] < 5:  # noqa: ASYNC110  # another task reads the log
                await anyio.sleep(0.05)
            paged = await page.get("/api/episodes", limit=2, offset=1)
            assert (paged["total"], [row["episode_id"] for row in paged["rows"]]) == (5, ["e3", "e2"])
            assert (await page.get("/api/episodes", text="E4"))["total"] == 1
            assert (await page.get("/api/episodes", state="lost"))["total"] == 0
            assert (await page.get("/api/groups"))["rows"][0]["episodes"] == 5
            shown = await page.get("/api/episodes/e2")
            assert {row["role"] for row in (await page.get("/api/overview"))["workers"]} >= {"environment", "inference"}
    assert shown["result"]["outcome"] == "completed" and shown["row"]["state"] == "completed"
    assert shown["spans"][0]["start"] == 0.0 and shown["spans"][-1]["kind"] == "verify"
    assert all(before["end"] == after["start"] for before, after in zip(shown["spans"], shown["spans"][1:], strict=False))
    turns = shown["turns"]
    assert len(turns) == shown["result"]["turns"]
    assert all(len(turn["action"]["ids"]) == len(turn["action"]["logprobs"]) == turn["action"]["tokens"] for turn in turns)


class Dropping(ScriptedEnvironment):
    """All but the last of the first two turns leave the context."""

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        return msgspec.structs.replace(step, context=ContextChange(keep_turns=1) if self._played == 2 else None)


async def test_turns_are_shown_with_their_segment_and_what_was_left_out() -> None:
    with anyio.fail_after(50):
        async with (
            played(1, Dropping) as server,
            server.connect(RUN, worker="monitor") as watching,
            open_page(watching) as page,
        ):
            turns = (await page.get("/api/episodes/e0"))["turns"]
    assert [turn["segment"] for turn in turns] == [0, 0, 1]
    assert [turn["begins"] for turn in turns[:2]] == ["", ""]
    assert turns[2]["begins"].startswith("segment 1 begins (context dropped): keeps ")
    assert ": keeps " in turns[2]["begins"] and "; 1 turn, " in turns[2]["begins"]


async def test_stopping_ends_streams_that_are_still_open() -> None:
    with anyio.fail_after(50):
        server = MemoryServer()
        async with server.connect(RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=2))
            async with open_page(bus) as page, page.events() as events:
                await anext(events)
        # leaving `open_page` sets `stop` while the stream is open; to get here is what is tested


def test_a_port_in_use_and_a_strange_address_are_refused_in_one_line() -> None:
    with bind("127.0.0.1", 0) as bound, pytest.raises(UserError, match="cannot be used"):
        bind("127.0.0.1", bound.getsockname()[1])
    with pytest.raises(UserError, match=r"--host 203\.0\.113\.1|cannot be used"):
        bind("203.0.113.1", 0)


async def test_the_command_tells_its_address_and_stops_on_sigterm(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with run_server(tmp_path / "nats") as server:
            async with connect(server.url, run=RUN) as bus:
                await bus.declare(plan_run(RUN, lanes=2))
            command = [sys.executable, "-m", "fleetbus_workers.cli", "monitor", RUN, "--nats", server.url, "--port", "0"]
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
            process = await anyio.open_process(command, cwd=tmp_path, stderr=subprocess.STDOUT, env=environment)
            async with process:
                assert process.stdout is not None
                line = (await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 1000)).decode()
                address = re.fullmatch(rf"run {RUN}: (http://127\.0\.0\.1:\d+/)\?key=([\w-]{{22}})\n?", line)
                assert address is not None, line
                async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                    assert (await client.get(f"{address[1]}api/overview")).status_code == 401
                    headers = {"authorization": f"Bearer {address[2]}"}
                    assert (await client.get(f"{address[1]}api/overview", headers=headers)).json()["run"] == RUN
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                rest = b"".join([chunk async for chunk in process.stdout])
    assert rest == b""
