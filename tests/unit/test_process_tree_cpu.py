"""CPU seconds of a tree of processes: each second once, whoever tells of it, also where nobody is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.process_tree_cpu import ProcessUsage, sum_usage

ROOT = 1


def used(parent: int, own: float, waited: float = 0.0, *, alive: bool = True) -> ProcessUsage:
    found = ProcessUsage(parent, own, waited)
    found.alive = alive
    return found


def test_what_lives_counts_with_the_brief_children_that_it_waited_for() -> None:
    zygote = used(ROOT, 1.0, 5.0)
    assert sum_usage({2: zygote}, ROOT, used(0, 2.0)) == 8.0


def test_a_process_that_was_seen_and_waited_for_counts_once() -> None:
    child = used(ROOT, 1.0, 5.0, alive=False)
    assert sum_usage({2: child}, ROOT, used(0, 2.0, 6.0)) == 8.0


def test_a_process_that_ended_unreported_counts_as_it_was_seen_last() -> None:
    child, grandchild = used(ROOT, 0.5, alive=False), used(2, 1.0, 5.0, alive=False)
    assert sum_usage({2: child, 3: grandchild}, ROOT, used(0, 2.0, 0.5)) == 8.5


MEASURED = """
import resource, subprocess, sys
from benchmarks.process_tree_cpu import TreeCpu
def spent(who):
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
own = spent(resource.RUSAGE_SELF)
with TreeCpu() as cpu:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
print(spent(resource.RUSAGE_SELF) - own, spent(resource.RUSAGE_CHILDREN), cpu.seconds)
"""
"""In a process of its own: that of the tests has children that live and spend time beside it."""


@pytest.mark.integration
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_seconds_of_real_children_are_found_once() -> None:
    spend = "import time\nwhile time.process_time() < 0.4: pass"
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spend!r}])\n{spend}"
    command = [sys.executable, "-c", MEASURED, inner]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    own, children, found = map(float, done.stdout.split())
    assert children >= 0.8
    assert children - 0.1 <= found <= 1.3 * children + own, "told by the child, and read in /proc meanwhile"
