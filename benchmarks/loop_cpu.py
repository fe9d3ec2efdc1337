"""CPU of all processes per step of the step loop, against the floor's or against another checkout's: a gate for regressions.

    python benchmarks/loop_cpu.py --rounds 5                                # ratio to `benchmarks/bare_loop.py`
    python benchmarks/loop_cpu.py --rounds 5 --base ../before --most 1.05   # exit code 1 above 1.05 times the CPU of ../before

Each round measures both, in changing order; the figure is the median of the rounds' ratios. What else runs on the machine
changes CPU per step, but that of both sides of a round alike, and much less than it changes rates. ``--base`` is a checkout of
another commit, run by ``--base-python`` (default: this one). One JSON object on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
ROLES = {"nats-server": "nats", "inference": "inference", "environment": "environment", "--answer": "answering"}


def read_cpu_seconds() -> dict[str, float]:
    """Of this process, as ``driver``, and of its children, by role."""
    import psutil

    used = {"driver": time.process_time()}
    for child in psutil.Process().children():
        words = " ".join(child.cmdline()[:8])
        role = next((role for word, role in ROLES.items() if word in words), "")
        if role:
            used[role] = sum(child.cpu_times()[:2])
    return used


def subtract(before: dict[str, float], steps: int) -> dict[str, float]:
    """Microseconds per step since then, by role and together."""
    now = read_cpu_seconds()
    fields = {role: round((now[role] - seconds) / steps * 1e6, 1) for role, seconds in before.items()}
    return fields | {"all": round(sum(fields.values()), 1)}


async def measure(what: str, sessions: int, turns: int) -> dict[str, float]:
    """``loop`` or ``floor`` of the checkout that is imported."""
    from benchmarks import bare_loop, step_loop
    from benchmarks.load_plan import LoadPlan, temporary_server

    plan, found = LoadPlan(sessions, turns), dict[str, float]()
    play, measure_floor = step_loop._play, bare_loop.AskingSide.measure

    async def play_measured(bus: Any, subjects: Any, plan: LoadPlan, prefix: str) -> float:
        before = read_cpu_seconds()
        wall = await play(bus, subjects, plan, prefix)
        if prefix != step_loop.WARM:
            found.update(subtract(before, sessions * turns))
        return wall

    async def measure_floor_measured(side: bare_loop.AskingSide, plan: LoadPlan) -> dict[str, float]:
        before = read_cpu_seconds()
        fields = await measure_floor(side, plan)
        found.update(subtract(before, sessions * turns))
        return fields

    step_loop._play = play_measured
    bare_loop.AskingSide.measure = measure_floor_measured  # type: ignore[method-assign, assignment]
    async with temporary_server() as url:
        if what == "floor":
            await bare_loop.measure_floor(url, [plan])
        else:
            with tempfile.TemporaryDirectory() as folder:
                await step_loop.measure(url, plan, Path(folder) / "report.json")
    return found


def run(root: Path, python: str, what: str, options: argparse.Namespace) -> dict[str, float]:
    command = [python, __file__, "--measure", what, "--sessions", str(options.sessions), "--turns", str(options.turns)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / part) for part in ("", "schemas", "workers"))}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the {what} of {root} failed: {done.stderr[-2000:]}")
    fields: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return fields


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--base", type=Path, help="a checkout of the commit to compare with, instead of the floor")
    parser.add_argument("--base-python", default=sys.executable, help="the Python that runs it")
    parser.add_argument("--most", type=float, default=0.0, metavar="RATIO", help="exit with 1 above this ratio; 0: never")
    parser.add_argument("--json", action="store_true", help="the output is JSON in any case")
    parser.add_argument("--measure", choices=("loop", "floor"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        import uvloop

        print(json.dumps(uvloop.run(measure(options.measure, options.sessions, options.turns))))
        return 0
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(options.rounds):
        for side in (ours, theirs) if number % 2 else (theirs, ours):
            is_base = side is theirs
            root, python = (options.base.resolve(), options.base_python) if is_base and options.base else (HERE, sys.executable)
            side.append(run(root, python, "floor" if is_base and not options.base else "loop", options))
    ratios = [own["all"] / other["all"] for own, other in zip(ours, theirs, strict=True)]
    ratio = round(statistics.median(ratios), 3)
    sides = {"ours": ours, "base" if options.base else "floor": theirs}
    medians = {
        name: {role: round(statistics.median(each[role] for each in rounds), 1) for role in rounds[0]}
        for name, rounds in sides.items()
    }
    print(
        json.dumps({"sessions": options.sessions, "cpu_ratio": ratio, "ratios": [round(each, 2) for each in ratios]} | medians)
    )
    if options.most and ratio > options.most:
        print(f"a step takes {ratio} times the CPU of {options.base or 'the floor'}, more than {options.most}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
