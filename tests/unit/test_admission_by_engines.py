"""No more episodes are out than the engines have room for, as their heartbeats say."""

from __future__ import annotations

import anyio

from fleetbus.bus.memory import MemoryServer
from fleetbus.config.settings import LearnerSettings
from fleetbus.core.training.ledger import Ledger
from fleetbus_schemas import EngineLoad, Heartbeat, Subjects, encode
from fleetbus_workers.learner.pool import GroupPool
from tests.support.virtual_time import virtual_time
from tests.unit.test_admission import RecordedRequests, build_admission, completed

anyio_backend = virtual_time


async def test_a_full_cache_holds_groups_back_until_it_has_room_again() -> None:
    settings = LearnerSettings(groups=8, group_size=2, max_staleness=0, steps=10)
    pool = GroupPool(Ledger(), minimum=2, max_staleness=0, stale_groups="drop")
    requests, subjects = RecordedRequests(), Subjects("r")
    admission = build_admission(requests, pool, settings)
    pool.record_version(0, 0)

    async with MemoryServer().connect("r") as bus:

        async def say(use: float, seconds: int) -> None:
            for _ in range(seconds // 2):
                beat = Heartbeat(role="inference", worker="i", engine=EngineLoad(kv_cache_use=use, preemptions=0))
                await bus.broadcast(subjects.heartbeat("inference", "i"), encode(beat))
                await anyio.sleep(2)

        with anyio.fail_after(500):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(admission.run, anyio.Event())
                tasks.start_soon(admission.follow, bus, subjects)
                await anyio.sleep(1)
                assert len(requests.asked) == admission.episode_limit == 16
                await say(0.95, 24)
                assert admission.episode_limit == 12
                for sequence, request in enumerate(requests.asked[:8], start=1):
                    pool.add_result(completed(request, sequence), 16 + sequence)
                pool.settle(pool.take(4, 0))
                await anyio.sleep(1)
                assert len(requests.asked) == 20, "8 are still out, and there is room for 4 more"
                await say(0.3, 24)
                assert admission.episode_limit == 16 and len(requests.asked) == 24
                tasks.cancel_scope.cancel()
