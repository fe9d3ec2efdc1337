"""Whoever has just begun to watch a run does not call its workers silent before a heartbeat could reach it."""

from __future__ import annotations

import anyio

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus_schemas import EpisodeRequested, Subjects, Task, WorkerStarted, encode
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time
SUBJECTS = Subjects("r")


async def test_a_run_is_judged_once_a_heartbeat_of_every_worker_could_have_come() -> None:
    async with MemoryServer().connect("r", worker="w") as bus:
        await bus.declare(plan_run("r", lanes=1))
        await bus.publish(SUBJECTS.life("environment", "e"), encode(WorkerStarted(role="environment", worker="e")))
        request = EpisodeRequested(
            episode_id="a", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default",
            deadline_ns=bus.now_ns() + 3600 * 10**9,
        )  # fmt: skip
        await bus.publish(SUBJECTS.task("default", "a"), encode(request), expected_last=0)
        await anyio.sleep(100)
        watch = RunObserver(bus, SUBJECTS, RunState(0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run)
            await anyio.sleep(HEARTBEAT_SECONDS / 2)
            assert not watch.is_behind(anyio.current_time())
            assert not watch.may_be_stuck(anyio.current_time())
            await anyio.sleep(HEARTBEAT_SECONDS)
            assert watch.may_be_stuck(anyio.current_time())
            tasks.cancel_scope.cancel()
