"""Slurm on loopback, of the test's own: munged, slurmctld and slurmd with one node of pretended cores and two partitions, where
an urgent job preempts spare ones with the notice of ``GRACE_SECONDS``."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc

from tests.support.ports import free_ports

CORES = 4
GRACE_SECONDS = 30
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun")

CONFIGURATION = """\
ClusterName=fleetbus
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=8000 State=UNKNOWN
PartitionName=spare Nodes={host} PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} Default=YES MaxTime=INFINITE
PartitionName=urgent Nodes={host} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


def find_missing() -> str:
    """The reason why Slurm cannot be started here; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd and munged are started as root here"


SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Slurm:
    """The clients' commands, with the environment that jobs get."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self._variables = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED} | variables

    async def command(self, *arguments: str) -> str:
        with anyio.fail_after(30):
            ended = await anyio.run_process(
                arguments, env=self._variables, cwd=self.folder, stderr=subprocess.STDOUT, check=False
            )
        assert ended.returncode == 0, (arguments, ended.stdout.decode())
        return ended.stdout.decode().strip()

    async def submit(self, *arguments: str) -> str:
        return await self.command("sbatch", "--parsable", *arguments)

    async def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by its own names."""
        words = (await self.command("scontrol", "show", "job", job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    async def until_state(self, job: str, *states: str, seconds: float = 60) -> dict[str, str]:
        with anyio.fail_after(seconds):
            while (shown := await self.show(job))["JobState"] not in states:  # noqa: ASYNC110  # another process does it
                await anyio.sleep(0.2)
        return shown


@asynccontextmanager
async def run_slurm(folder: Path, variables: dict[str, str]) -> AsyncIterator[Slurm]:
    """A cluster whose node is idle. ``folder`` has to have a short path: sockets lie in it."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    controller, daemon = free_ports(2)
    settings = {"host": socket.gethostname().partition(".")[0], "folder": folder, "cores": CORES, "grace": GRACE_SECONDS}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(controller=controller, daemon=daemon, **settings))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
    files |= {"seed-file": "munged.seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in files.items())]
    slurm, started = Slurm(folder, variables), []
    try:
        for line in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            started.append(await _start(line, folder))
            if line is munged:
                await _wait_for_file(anyio.Path(folder / "munge.socket"))
        with anyio.fail_after(30):
            while "State=IDLE" not in await _ask_node(slurm):  # noqa: ASYNC110  # another process does it
                await anyio.sleep(0.2)
        yield slurm
    finally:
        with anyio.CancelScope(shield=True):
            await _end_jobs(slurm)
            for process in reversed(started):
                process.terminate()
                with anyio.move_on_after(20):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                await process.aclose()


async def _end_jobs(slurm: Slurm) -> None:
    """Jobs outlive the daemons that started them."""
    with anyio.move_on_after(30), suppress(AssertionError):
        await slurm.command("scancel", "--full", "--signal=KILL", "--user=root")
        await slurm.command("scancel", "--user=root")
        while await slurm.command("squeue", "--noheader"):  # noqa: ASYNC110  # another process does it
            await anyio.sleep(0.2)


async def _start(line: list[str], folder: Path) -> anyio.abc.Process:
    variables = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED}
    with (folder / f"{line[0]}.out").open("wb") as out:
        return await anyio.open_process(line, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


async def _wait_for_file(file: anyio.Path) -> None:
    with anyio.fail_after(20):
        while not await file.exists():  # noqa: ASYNC110  # another process makes it
            await anyio.sleep(0.05)


async def _ask_node(slurm: Slurm) -> str:
    try:
        return await slurm.command("scontrol", "show", "node")
    except AssertionError:
        return ""
