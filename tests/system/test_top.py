"""``fleetbus top`` and the watchdog: a killed worker is seen, a stuck run is named, a healthy one is not."""

from __future__ import annotations

import io
from typing import Any

import anyio
import msgspec
from rich.console import Console

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.jetstream import ServerView, fetch_server_view
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.watchdog import find_stalls
from fleetbus_workers.observe.top.view import build_facts, screen
from tests.support.small_deployment import LIMITS, RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


class Onlooker:
    """What `top` knows after some time."""

    def __init__(self, fleet: SmallDeployment) -> None:
        self.state = RunState(steps=0)
        self.watch = RunObserver(fleet.bus, fleet.subjects, self.state)
        self._fleet = fleet

    def stalls(self, stall_seconds: float = 60.0) -> list[Any]:
        return find_stalls(
            self.state,
            self.watch.health,
            now=anyio.current_time(),
            now_ns=self._fleet.bus.now_ns(),
            stall_seconds=stall_seconds,
        )

    def shown(self) -> str:
        now, now_ns = anyio.current_time(), self._fleet.bus.now_ns()
        view = RunView(self.state, self.watch.health, ServerView(slow_consumers=2), self.stalls(), now=now, now_ns=now_ns)
        content = build_facts(view, run=RUN)
        console = Console(width=80, file=io.StringIO())
        console.print(screen(content))
        return str(console.file.getvalue())  # type: ignore[attr-defined]


async def test_a_killed_worker_is_shown_within_five_seconds() -> None:
    async with small_deployment(build_configuration()) as fleet, anyio.create_task_group() as group:
        look = Onlooker(fleet)
        group.start_soon(look.watch.run)
        worker = fleet.environment("env-to-kill")
        fleet.inference("inf")
        await fleet.heard(*fleet.members.values())
        await anyio.sleep(3)
        assert "env-to-kill" in look.shown() and "silent" not in look.shown()
        worker.kill()
        await anyio.sleep(5)
        line = next(line for line in look.shown().splitlines() if "env-to-kill" in line)
        assert "silent" in line
        assert all(len(line) <= 80 for line in look.shown().splitlines())
        group.cancel_scope.cancel()


async def test_a_run_without_environment_workers_is_stuck_there() -> None:
    async with small_deployment(build_configuration()) as fleet, anyio.create_task_group() as group:
        look = Onlooker(fleet)
        group.start_soon(look.watch.run)
        await fleet.request("e1")
        await anyio.sleep(50)
        assert look.stalls() == []
        await anyio.sleep(20)
        (stall,) = look.stalls()
        assert stall.where == "environment" and "1 episode waiting" in stall.reason and 65 < stall.seconds < 75
        assert "stuck at the environment for 70 s" in " ".join(look.shown().split())
        fleet.environment("env")
        fleet.inference("inf")
        await fleet.result("e1")
        await anyio.sleep(1)
        assert look.stalls() == []
        group.cancel_scope.cancel()


async def test_a_run_whose_inference_worker_died_is_stuck_there_and_names_it() -> None:
    async with small_deployment(build_configuration()) as fleet, anyio.create_task_group() as group:
        look = Onlooker(fleet)
        group.start_soon(look.watch.run)
        fleet.environment("env")
        inference = fleet.inference("inf-dead", sampler=ScriptedSampler(delay=lambda request: 1e6))
        await fleet.heard(*fleet.members.values())
        await fleet.request("e1", task=Task(key="t"), deadline_seconds=1e5)
        await anyio.sleep(2)
        inference.kill()
        await anyio.sleep(5)
        (stall, *_) = look.stalls(stall_seconds=3)
        assert stall.where == "inference" and "inf-dead is silent" in stall.reason
        group.cancel_scope.cancel()


async def test_an_engine_that_hangs_is_where_the_run_is_stuck() -> None:
    def hang(request: GenerationRequest) -> float:
        return 1e6

    async with small_deployment(build_configuration()) as fleet, anyio.create_task_group() as group:
        look = Onlooker(fleet)
        group.start_soon(look.watch.run)
        env = fleet.environment("env")
        inf = fleet.inference("inf", sampler=ScriptedSampler(delay=hang))
        await fleet.heard(*fleet.members.values())
        await fleet.request("e1", deadline_seconds=1e5)
        await anyio.sleep(7)
        (stall, *_) = look.stalls(stall_seconds=5)
        assert stall.where == "inference" and "1 observations are being answered" in stall.reason
        for member in (env, inf):
            member.kill()
        group.cancel_scope.cancel()


class SlowToVerify(ScriptedEnvironment):
    """Episodes of the task ``slow`` are verified for ever."""

    async def verify(self) -> Verdict:
        if self._prompt == "slow":
            await anyio.sleep_forever()
        return await super().verify()


async def test_a_group_that_waits_for_one_slow_verifier_is_stuck_there() -> None:
    limits = msgspec.structs.replace(LIMITS, verify=1e5, episode=2e5)
    async with small_deployment(build_configuration(limits=limits)) as fleet, anyio.create_task_group() as group:
        look = Onlooker(fleet)
        group.start_soon(look.watch.run)
        env = fleet.environment("env", make=SlowToVerify)
        fleet.inference("inf")
        for name in ("quick", "slow"):
            await fleet.request(f"e-{name}", task=Task(key="t", prompt=name), deadline_seconds=1e5)
        await fleet.result("e-quick")
        await anyio.sleep(70)
        (stall,) = look.stalls()
        assert stall.where == "environment" and 60 < stall.seconds < 75
        assert "0 episodes waiting, 1 running, and none completes (1 in verify)" in stall.reason
        assert "group g waits for 1 of its 2: e-slow on env" in stall.reason
        env.kill()
        await anyio.sleep(6)
        (stall,) = look.stalls()
        assert "no environment worker is alive (env is silent for" in stall.reason
        group.cancel_scope.cancel()


async def test_what_the_server_does_not_tell_is_unknown() -> None:
    async with small_deployment(build_configuration()) as fleet:
        view = await fetch_server_view(fleet.bus, RUN)
        assert view == ServerView() and view.pending == 0
