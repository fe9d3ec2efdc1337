"""An archive that forgets by age removes nothing because the server's clock was set forward: it would be gone for good."""

from __future__ import annotations

from pathlib import Path

import anyio

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import ArchiveSettings
from fleetbus.log.archive_reader import read_archive
from fleetbus_schemas import Subjects
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from tests.support.small_deployment import RUN, build_configuration, run_inline
from tests.support.virtual_time import virtual_time

S = Subjects(RUN)
HOUR = 3600

anyio_backend = virtual_time


async def test_only_what_has_become_old_leaves_an_archive_when_the_servers_clock_is_set_forward(tmp_path: Path) -> None:
    server, drain = MemoryServer(), anyio.Event()
    configuration = build_configuration(recorder=ArchiveSettings(keep_hours=1))
    async with server.connect(RUN) as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run(RUN, lanes=1))

        async def record() -> None:
            await run_recorder(
                bus, configuration=configuration, name="recorder", drain=drain, folder=tmp_path,
                settings=RecorderSettings(settle_seconds=1.0), runtime=Runtime(offload=run_inline),
            )  # fmt: skip

        async def work(hours: float) -> int:
            """The first entry in the archive after so many hours."""
            for _ in range(int(hours * HOUR / 60)):
                await bus.publish(S.life("environment", "w"), b"x")
                await anyio.sleep(60)
            return next(read_archive(tmp_path)).sequence

        tasks.start_soon(record)
        assert await work(0.7) == 1
        server.step_clock(10 * HOUR)
        assert await work(0.2) == 1
        assert await work(2) > 1
        drain.set()
