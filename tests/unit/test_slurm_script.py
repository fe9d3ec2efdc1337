"""The script of Slurm jobs against stand-ins of Slurm's commands: when a job queues again, ends, or starts its worker anew.

Slurm itself: tests/system/test_slurm.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fleetbus.config.load import load_configuration
from tests.support.command_lines import parse_command_line

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "role.sbatch"
NOTICE_SECONDS = 30

SCONTROL = """#!/bin/bash
echo "scontrol $*" >> calls
[ "$1" = show ] && cat job
exit 0
"""
SRUN = """#!/bin/bash
echo "srun $*" >> calls
trap 'exit 0' TERM
[ -f status ] && { read -r status < status; rm status; [ -f then ] && mv then status; exit "$status"; }
[ -f waits ] && { touch began; while true; do read -r -t 0.05 <> pipe; done; }
exit 0
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> calls
kill -TERM "$(cat step)"
"""
SLEEP = """#!/bin/bash
[ -f notice ] && kill -TERM "$PPID"
exit 0
"""
RUNNING, PREEMPTED = "JobState=RUNNING PreemptTime=None", "JobState=RUNNING PreemptTime=2026-11-27T16:37:19"
CANCELLED = "JobState=COMPLETING PreemptTime=2026-11-27T16:37:19"


def start(folder: Path, job: str) -> subprocess.Popen[bytes]:
    (folder / "job").write_text(job)
    os.mkfifo(folder / "pipe")
    srun = SRUN.replace("trap", "echo $$ > step\ntrap", 1)
    for name, text in (("scontrol", SCONTROL), ("srun", srun), ("scancel", SCANCEL), ("sleep", SLEEP)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "FLEETBUS_NATS_URL": "nats://h"}
    return subprocess.Popen(["bash", str(SCRIPT), "environment"], cwd=folder, env=variables)


def read_calls(folder: Path) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if not line.startswith("scontrol show")]


WORKER = "srun --ntasks=1 --kill-on-bad-exit=0 fleetbus environment"


@pytest.mark.parametrize(
    ("job", "calls"),
    [(RUNNING, [WORKER]), (PREEMPTED, [WORKER, "scontrol requeue 7"]), (CANCELLED, [WORKER])],
    ids=["finished", "preempted", "cancelled"],
)
def test_only_a_preempted_job_queues_again_and_then_ends_at_once(tmp_path: Path, job: str, calls: list[str]) -> None:
    assert start(tmp_path, job).wait(20) == 0
    assert read_calls(tmp_path) == calls


def test_a_worker_that_fails_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("3\n")
    assert start(tmp_path, RUNNING).wait(20) == 0
    assert read_calls(tmp_path) == [WORKER, WORKER]


def test_a_worker_that_refuses_what_it_is_given_ends_its_job_and_does_not_queue_again(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("2\n")
    assert start(tmp_path, RUNNING).wait(20) == 2
    assert read_calls(tmp_path) == [WORKER]


def test_a_worker_that_has_worked_and_refuses_for_a_while_is_started_again(tmp_path: Path) -> None:
    """The servers of the log may be away while it starts."""
    (tmp_path / "status").write_text("3\n")
    (tmp_path / "then").write_text("2\n")
    assert start(tmp_path, RUNNING).wait(20) == 0
    assert read_calls(tmp_path) == [WORKER, WORKER, WORKER]


def test_a_preempted_job_queues_again_whatever_its_worker_ended_with(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("2\n")
    assert start(tmp_path, PREEMPTED).wait(20) == 0
    assert read_calls(tmp_path) == [WORKER, "scontrol requeue 7"]


def test_a_notice_before_the_time_limit_drains_the_worker_and_queues_the_job_again(tmp_path: Path) -> None:
    (tmp_path / "waits").touch()
    process = start(tmp_path, RUNNING)
    end = time.monotonic() + 20
    while not (tmp_path / "began").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert read_calls(tmp_path) == [WORKER, "scancel --quiet --signal=TERM 7", "scontrol requeue 7"]


def test_a_notice_between_two_workers_begins_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("3\n")
    (tmp_path / "notice").touch()
    assert start(tmp_path, RUNNING).wait(20) == 0
    assert read_calls(tmp_path) == [WORKER, "scancel --quiet --signal=TERM 7", "scontrol requeue 7"]


@pytest.mark.parametrize(("arguments", "words"), [([], "needs a role"), (["environment"], "set FLEETBUS_NATS_URL")])
def test_a_job_without_a_role_or_a_server_says_what_it_needs(arguments: list[str], words: str) -> None:
    variables = {"PATH": os.environ["PATH"]}
    ended = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=variables, check=False)
    assert ended.returncode and words in ended.stderr


def test_its_settings_are_settings_and_a_worker_drains_within_the_notice() -> None:
    content = SCRIPT.read_text()
    defaults = dict(re.findall(r'^export (\w+)="\$\{\w+:-(\w+)\}"', content, flags=re.MULTILINE))
    configuration = load_configuration(variables=defaults).configuration
    assert defaults.keys() == {"FLEETBUS_LIMITS_DRAIN", "FLEETBUS_LOG_FORMAT"} and configuration.limits.drain < NOTICE_SECONDS
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@60"} <= set(
        re.findall(r"^#SBATCH (\S+)$", content, re.MULTILINE)
    )
    for role in ("environment", "inference", "learner"):
        assert parse_command_line([role]) == role
