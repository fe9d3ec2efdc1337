"""Environment workers as Slurm jobs that others preempt with notice: they hand back, queue again, and no episode is lost."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import (
    EpisodeFinished,
    StepTrained,
    Subjects,
    TrainingFinished,
    WorkerDraining,
    WorkerStarted,
    WorkerStopped,
)
from tests.support.slurm import CORES, GRACE_SECONDS, Slurm, find_missing, run_slurm

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow, pytest.mark.skipif(bool(find_missing()), reason=find_missing())]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "role.sbatch"
ROLE = Path(__file__).with_name("rolling_role.py")
RUN = "slurm"
S = Subjects(RUN)
SETTINGS = {
    "RUN_NAME": RUN, "NATS_LANES": "4", "LEARNER_STEPS": "150", "LEARNER_GROUPS": "2", "LEARNER_GROUP_SIZE": "2",
    "LEARNER_CHECKPOINT_EVERY": "2", "EVALUATION_EPISODES": "0", "ENVIRONMENT_SLOTS": "8",
}  # fmt: skip

PROGRAM = f"""#!/bin/bash
exec {sys.executable} {ROLE} "$1" "$1-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}-$$"
"""
"""What the script calls `fleetbus`: a role without a model."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slurm") as made:  # paths of sockets are short
        Path(made).chmod(0o755)
        yield Path(made)


@asynccontextmanager
async def role(name: str, variables: dict[str, str], folder: Path) -> AsyncIterator[anyio.abc.Process]:
    with (folder / f"{name}.log").open("ab") as out:
        line = [sys.executable, str(ROLE), name, name]
        process = await anyio.open_process(line, env=os.environ | variables, cwd=folder, stdout=out, stderr=out)
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.aclose()


async def wait_for_steps(bus: Bus, count: int) -> None:
    """Until so many steps were trained after now."""
    start = (await bus.log_state()).last_sequence + 1
    with anyio.fail_after(60):
        async with bus.read([S.train("default")], start=start) as reader:
            while count:
                message = read_stored(await reader.receive())
                assert not isinstance(message, TrainingFinished), "training ended too early: raise LEARNER_STEPS"
                count -= isinstance(message, StepTrained)


async def read_lives(bus: Bus, job: str) -> list[list[str]]:
    """What was said by each worker of a job, in order."""
    lives: dict[str, list[str]] = {}
    kinds = (WorkerStarted, WorkerDraining, WorkerStopped)
    async for entry in bus.scan([f"fb.{RUN}.life.environment.environment-{job}-*", f"fb.{RUN}.life.environment.*"]):
        message = read_stored(entry)
        if isinstance(message, kinds) and message.worker.startswith(f"environment-{job}-"):
            lives.setdefault(message.worker, []).append(type(message).__name__)
    return list(lives.values())


async def take_back(slurm: Slurm, job: str, *, restarts: int) -> None:
    """Let a job begin at once that queues for the ``restarts``-th time: Slurm waits two minutes after its end is complete."""
    with anyio.fail_after(90):
        while (shown := await slurm.show(job))["JobState"] != "RUNNING" or shown["Restarts"] != f"{restarts}":
            if shown["JobState"] == "PENDING":
                await slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")
            await anyio.sleep(0.5)


async def test_preempted_workers_hand_back_queue_again_and_the_audit_balances(folder: Path) -> None:
    binary = folder / "bin" / "fleetbus"
    binary.parent.mkdir()
    binary.write_text(PROGRAM)
    binary.chmod(0o755)
    async with run_server(folder / "nats") as server, connect(server.url, run=RUN, worker="test") as bus:
        variables = {f"FLEETBUS_{name}": value for name, value in SETTINGS.items()}
        variables |= {"FLEETBUS_NATS_URL": server.url, "FLEETBUS_RUN_FOLDER": str(folder / "runs"), "PYTHONPATH": str(ROOT)}
        await anyio.run_process([sys.executable, str(ROLE), "init", "init"], env=os.environ | variables, cwd=folder)
        path = {"PATH": f"{binary.parent}:{os.environ['PATH']}:/usr/sbin"}
        async with (
            run_slurm(folder / "s", variables | path) as slurm,
            role("inference", variables, folder),
            role("learner", variables, folder) as learner,
        ):
            job = await slurm.submit("--partition=spare", f"--cpus-per-task={CORES}", str(SCRIPT), "environment")
            await slurm.until_state(job, "RUNNING")
            await wait_for_steps(bus, 3)
            began = anyio.current_time()
            urgent = await slurm.submit("--partition=urgent", f"--cpus-per-task={CORES}", "--wrap", "sleep 2")
            await slurm.until_state(urgent, "RUNNING", "COMPLETED")
            given_back = anyio.current_time() - began
            log = "".join(file.read_text() for file in (folder / "s").glob("fleetbus-*.log"))
            assert given_back < GRACE_SECONDS, f"the node was given back only when the notice was over:\n{log}"
            await slurm.until_state(urgent, "COMPLETED")
            await take_back(slurm, job, restarts=1)
            await wait_for_steps(bus, 3)
            await slurm.command("scancel", "--batch", "--signal=TERM", job)  # as before its time limit
            await take_back(slurm, job, restarts=2)
            await wait_for_steps(bus, 3)
            with anyio.fail_after(150):
                assert await learner.wait() == 0, (folder / "learner.log").read_text()[-2000:]
            await slurm.command("scancel", "--signal=TERM", job)  # drained as by an operator: over
            shown = await slurm.until_state(job, "COMPLETED")
            assert shown["ExitCode"] == "0:0"
        lives = await read_lives(bus, job)
        assert lives == [["WorkerStarted", "WorkerDraining", "WorkerStopped"]] * 3, lives
        report = await audit_run(bus, S)
        assert report.balanced, report
        entries = [read_stored(entry) async for entry in bus.scan([f"fb.{RUN}.episode.*"])]
        outcomes = Counter(entry.outcome for entry in entries if isinstance(entry, EpisodeFinished))
        print(f"node given back after {given_back:.1f} s of {GRACE_SECONDS}; outcomes: {dict(outcomes)}")
        assert set(outcomes) <= {"completed", "truncated", "cancelled"}


async def test_a_job_that_a_person_cancels_does_not_queue_again(folder: Path) -> None:
    binary = folder / "bin" / "fleetbus"
    binary.parent.mkdir()
    binary.write_text("#!/bin/bash\nexec sleep 600\n")
    binary.chmod(0o755)
    variables = {"FLEETBUS_NATS_URL": "nats://127.0.0.1:1", "PATH": f"{binary.parent}:{os.environ['PATH']}:/usr/sbin"}
    async with run_slurm(folder / "s", variables) as slurm:
        job = await slurm.submit("--partition=spare", str(SCRIPT), "environment")
        await slurm.until_state(job, "RUNNING")
        await anyio.sleep(1)
        await slurm.command("scancel", job)
        shown = await slurm.until_state(job, "CANCELLED")
        assert shown["Restarts"] == "0"
