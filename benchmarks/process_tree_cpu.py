"""CPU seconds of a process and of everything below it, also of what is not reported to it when it ends (Linux).

`resource.RUSAGE_CHILDREN` knows of children that were waited for, each with those that it waited for itself. Behind a PID
namespace, as isolation makes one, that chain is broken: its first process ends by a signal, with nobody left below it to tell.
So the tree is read from ``/proc`` as long as it lives: what a process used with those that it waited for can be read there.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Mapping
from types import TracebackType

INTERVAL_SECONDS = 0.1
"""What a process uses after it was last read, and does not report, is missed."""

_TICK = os.sysconf("SC_CLK_TCK")


class ProcessUsage:
    """What was read last of one process: CPU seconds of its own, and of children that it waited for."""

    __slots__ = ("alive", "own", "parent", "waited")

    def __init__(self, parent: int, own: float, waited: float) -> None:
        self.parent, self.own, self.waited = parent, own, waited
        self.alive = True


class TreeCpu:
    """``seconds`` are those between entering and leaving, of this process and of all below it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stop = threading.Event()
        self._seen: dict[int, ProcessUsage] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> TreeCpu:
        self._own, self._waited = _read_cpu_seconds(resource.RUSAGE_SELF), _read_cpu_seconds(resource.RUSAGE_CHILDREN)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        root = ProcessUsage(
            0, _read_cpu_seconds(resource.RUSAGE_SELF) - self._own, _read_cpu_seconds(resource.RUSAGE_CHILDREN) - self._waited
        )
        self.seconds = sum_usage(self._seen, os.getpid(), root)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._read()

    def _read(self) -> None:
        living = _list_descendants(os.getpid())
        for process, used in self._seen.items():
            used.alive = process in living
        self._seen |= living


def sum_usage(seen: Mapping[int, ProcessUsage], process: int, used: ProcessUsage) -> float:
    """All that a process and those below it used: its own, those of the living, and of the dead the larger of what it was told
    when it waited for them and of what was read while they lived."""
    living = dead = 0.0
    for child, each in seen.items():
        if each.parent == process:
            seconds = sum_usage(seen, child, each)
            living, dead = (living + seconds, dead) if each.alive else (living, dead + seconds)
    return used.own + living + max(used.waited, dead)


def _list_descendants(root: int) -> dict[int, ProcessUsage]:
    found: dict[int, ProcessUsage] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        times = [int(each) / _TICK for each in fields[11:15]]
        found[int(name)] = ProcessUsage(int(fields[1]), times[0] + times[1], times[2] + times[3])
    below: dict[int, ProcessUsage] = {}
    level = {root}
    while level:
        level = {process for process, used in found.items() if used.parent in level}
        below |= {process: found[process] for process in level}
    return below


def _read_cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
