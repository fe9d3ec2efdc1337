"""Trains a recipe from several seeds, one after another, and writes what came of it beside the recipe.

    python benchmarks/recipe_curves.py sums --seeds 1 2 3 --evaluation-every 10

Each seed is one `fleetbus up --recipe NAME --seed N` in a folder of its own, with all flags that are not this script's.
``recipes/NAME/expected.json`` gets for each seed the success of every step, the held-out evaluations with the number of their
tasks, and what the command took: wall seconds, seconds of CPU, and the most resident memory of one process. A band is the
least and the most of the seeds at each step. Seeds that stand there already are kept unless they are trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 3600

TAKEN = (
    "success_start", "success_start_greedy", "success_end", "success_end_greedy", "intervals", "evaluated_tasks",
    "max_logprob_difference", "mean_logprob_difference", "success_by_step",
)  # fmt: skip


def train(recipe: str, seed: int, folder: Path, options: list[str]) -> dict[str, Any]:
    """One seed; what it printed goes to ``folder/out.txt``. Raises `subprocess.SubprocessError`."""
    command = [sys.executable, "-m", "fleetbus", "up", "--recipe", recipe, "--seed", str(seed), "--no-monitor", *options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (folder / "out.txt").open("w") as out:
        subprocess.run(command, cwd=folder, stdout=out, stderr=out, timeout=LIMIT_SECONDS, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {"seed": seed, "wall_seconds": round(time.monotonic() - began), "cpu_seconds": round(cpu_seconds)} | {
        "load_before": os.getloadavg()[0],
        "most_resident_mib": used.ru_maxrss // 1024,
        **read_summary(folder / ".fleetbus" / "runs" / recipe / "summary.json"),
    }


def read_summary(file: Path) -> dict[str, Any]:
    summary = json.loads(file.read_bytes())
    return {key: summary[key] for key in TAKEN}


def compute_band(curves: list[dict[str, Any]]) -> dict[str, list[float]]:
    """At each step that all seeds have: the least and the most success."""
    columns = list(zip(*(curve["success_by_step"] for curve in curves), strict=False))
    return {"least": [min(column) for column in columns], "most": [max(column) for column in columns]}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a folder that keeps the runs, to read them afterwards")
    arguments, options = parser.parse_known_args()
    file = ROOT / "recipes" / arguments.recipe / "expected.json"
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary)
            if arguments.keep is not None:
                folder = arguments.keep / f"{arguments.recipe}-{seed}"
                folder.mkdir(parents=True)
            curve = train(arguments.recipe, seed, folder, options)
        kept = [each for each in json.loads(file.read_bytes())["curves"] if each["seed"] != seed]
        curves = sorted([*kept, curve], key=lambda each: each["seed"])
        seeds = [str(each["seed"]) for each in curves]
        command = ["python", "benchmarks/recipe_curves.py", arguments.recipe, "--seeds", *seeds, *options]
        written = {"measured": True, "command": " ".join(command), "band": compute_band(curves), "curves": curves}
        file.write_text(json.dumps(written, indent=1) + "\n")
        print(json.dumps({key: curve[key] for key in ("seed", "wall_seconds", "cpu_seconds")}), flush=True)


if __name__ == "__main__":
    main()
