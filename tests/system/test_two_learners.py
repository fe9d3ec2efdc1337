"""Two learners of one run, both kept running by somebody: the later one trains, the earlier one stops for good."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration
from fleetbus_schemas import LineageStarted, Subjects, encode
from fleetbus_workers.cli.roles.role import run_role
from fleetbus_workers.command.exit_status import CRASHED, FINISHED
from fleetbus_workers.learner.journal import FencedAppender
from tests.support.servers import connect, run_server


async def replaced(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
    """A learner in whose place another begins."""
    subjects = Subjects(configuration.run.name)
    chain = FencedAppender(bus, subjects.train("default"), 0)
    async with anyio.create_task_group() as group:
        group.start_soon(chain.watch)
        await chain.append(LineageStarted(lineage="l1", worker=name))
        await bus.publish(subjects.train("default"), encode(LineageStarted(lineage="l2", worker="another")))
        await chain.append(LineageStarted(lineage="l1", worker=name))


async def broken(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
    raise ValueError("a bug")


@pytest.mark.parametrize(("work", "status"), [("replaced", FINISHED), ("broken", CRASHED)])
async def test_a_replaced_learner_ends_as_if_it_were_finished_and_a_broken_one_does_not(
    work: str, status: int, tmp_path: Path
) -> None:
    """A supervisor starts again what crashed: two learners that crash for each other would never train a step."""
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server, connect(server.url, run="two") as bus:
            await bus.declare(plan_run("two", lanes=1))
            variables = os.environ | {"FLEETBUS_NATS_URL": server.url, "FLEETBUS_RUN_NAME": "two"}
            ended = await anyio.run_process([sys.executable, __file__, work], env=variables, check=False, cwd=tmp_path)
    assert ended.returncode == status, ended.stderr.decode()


if __name__ == "__main__":
    sys.exit(run_role("learner", lambda: {"replaced": replaced, "broken": broken}[sys.argv[1]], {}))
