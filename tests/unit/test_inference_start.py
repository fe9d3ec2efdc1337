"""An inference worker that is asked to stop while it still reads its model, which takes seconds to minutes."""

import threading

import anyio
import pytest

from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_workers.assembly import engines
from fleetbus_workers.assembly.inference_work import work
from fleetbus_workers.replay.fixtures import memory_bus
from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone


@pytest.mark.anyio
async def test_a_worker_that_is_asked_to_stop_while_it_reads_its_model_does_not_read_on(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    reading, released = threading.Event(), threading.Event()

    def read(*_):
        reading.set()
        released.wait(60)

    monkeypatch.setattr(engines, "_load_template", read)
    configuration = Configuration(run=RunSettings(name="run", folder=str(tmp_path)))
    drain = anyio.Event()
    try:
        with anyio.fail_after(30):
            async with memory_bus("run") as bus, anyio.create_task_group() as tasks:
                tasks.start_soon(work, bus, configuration, "inference", drain)
                assert await anyio.to_thread.run_sync(reading.wait, 30)
                drain.set()
    finally:
        released.set()
