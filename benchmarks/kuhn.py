"""Kuhn poker by self-play: exploitability of a run's versions, and of as many updates in one process without a bus.

    python benchmarks/kuhn.py --seeds 1 2 3                        # three runs, one after another, and three loops beside them
    python benchmarks/kuhn.py --seeds 1 --run .fleetbus/runs/kuhn  # of a finished run with --learner-keep-weights 100000
    python benchmarks/kuhn.py --seeds 1 --no-run --loop-threads 1  # the loop alone

A run is `fleetbus up --config docs/examples/kuhn.toml` with the environment and the deals beside it; flags that are not this
script's are given on to it, and hold for the loop too. Exploitability is exact, read from the probabilities of every published
version (`benchmarks/kuhn_policy.py`), ``newest``, and of the reference that follows them, ``mean``, which a run leaves as its
model; 0 is an equilibrium, and the limit is .05. ``seconds`` are from a run's first request to its last step, ``to_limit`` to
the first of three measurements of ``mean`` in a row that are below the limit, ``ratio`` the first divided by the loop's for as
many updates, ``ratio_to_limit`` the same of ``to_limit``. None contains what is measured here, nor the start of processes,
which ``command`` does. ``saved`` is the model folder of the finished run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.kuhn_loop import train_in_one_process
from benchmarks.kuhn_policy import EXAMPLE, Prompts, measure_gains, read_play
from fleetbus import open_run
from fleetbus.config.fields import list_settings
from fleetbus.config.load import load_configuration
from fleetbus.config.settings import Configuration
from fleetbus_workers.starter.build import find_starter_folder

LIMIT = 0.05
IN_A_ROW = 3
KEPT = 100_000
"""Versions: all of them."""


class Point(msgspec.Struct, frozen=True):
    """What was measured after ``step`` updates, ``seconds`` from the beginning."""

    step: int
    seconds: float
    newest: float
    mean: float


def load_settings(seed: int, options: Sequence[str]) -> Configuration:
    """The configuration that a run with these flags has."""
    flags: dict[str, Any] = {"run.seed": seed, "run.tasks": str(EXAMPLE.with_suffix(".json"))}
    by_flag = {setting.flag: setting.name for setting in list_settings()}
    for flag, value in zip(options[::2], options[1::2], strict=True):
        flags[by_flag[flag]] = value
    return load_configuration(file=EXAMPLE.with_suffix(".toml"), flags=flags).configuration


def start_run(folder: Path, seed: int, options: Sequence[str]) -> float:
    """Train with `fleetbus up` in ``folder``; seconds of the whole command. Raises `subprocess.SubprocessError`."""
    command = [
        sys.executable, "-m", "fleetbus", "up", "--config", str(EXAMPLE.with_suffix(".toml")), "--seed", str(seed),
        "--environment", f"{EXAMPLE}:Kuhn", "--tasks", str(EXAMPLE.with_suffix(".json")), "--no-monitor",
        "--learner-keep-weights", str(KEPT), *options,
    ]  # fmt: skip
    began = time.monotonic()
    with (folder / "out.txt").open("w") as out:
        subprocess.run(command, cwd=folder, stdout=out, stderr=out, check=True)
    return time.monotonic() - began


def measure_run(folder: Path, every: int, configuration: Configuration) -> list[Point]:
    """Of a run in ``folder``, the start and every so many steps; versions are those that a step published."""
    run = open_run(folder)
    steps = list(run.metrics())
    began = min(row.requested_ns for row in run.episodes() if row.split == "train" and row.requested_ns)
    model, mean = (AutoModelForCausalLM.from_pretrained(find_starter_folder()).eval() for _ in range(2))
    algorithm, meter = configuration.algorithm, Meter(configuration.episode.temperature)
    meter.measure(0, 0.0, model, mean)
    for step in steps:
        file = folder / "weights" / f"{step.lineage}-v{step.version:06d}.safetensors"
        model.load_state_dict(load_file(file), strict=False)  # a tied head is stored once
        if step.step % algorithm.reference_sync_steps == 0:
            follow(mean, model, algorithm.reference_mixup_alpha)
        if step.step % every == 0 or step is steps[-1]:
            meter.measure(step.step, (step.time_ns - began) / 1e9, model, mean)
    return meter.points


@torch.no_grad()
def follow(mean: PreTrainedModel, model: PreTrainedModel, share: float) -> None:
    """What the trainer does with its reference after a step, from the versions that it published."""
    for own, trained in zip(mean.parameters(), model.parameters(), strict=True):
        own.lerp_(trained, share)


def read_saved(folder: Path, configuration: Configuration) -> float:
    """Exploitability of the model that a run left."""
    return Meter(configuration.episode.temperature).read(AutoModelForCausalLM.from_pretrained(folder).eval())


class Meter:
    """Measures models at the temperature at which they play, and keeps what it found."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self.points: list[Point] = []
        self._prompts: Prompts | None = None

    def measure(self, step: int, seconds: float, model: PreTrainedModel, mean: PreTrainedModel) -> None:
        self.points.append(Point(step, round(seconds, 2), self.read(model), self.read(mean)))

    def read(self, model: PreTrainedModel) -> float:
        """Exploitability of a model."""
        if self._prompts is None:
            vocabulary = model.get_input_embeddings().weight.shape[0]
            self._prompts = Prompts(find_starter_folder(), vocabulary, self._temperature)
        return round(measure_gains(read_play(model, self._prompts)).exploitability, 4)


def run_loop(configuration: Configuration, threads: int, every: int, *, quiet: bool) -> list[Point]:
    """The same updates in this process."""
    meter, seconds = Meter(configuration.episode.temperature), 0.0

    def measure(step: int, model: PreTrainedModel, mean: PreTrainedModel) -> None:
        if step % every == 0 or step == configuration.learner.steps:
            meter.measure(step, seconds, model, mean)
            if not quiet:
                print("loop", msgspec.json.encode(meter.points[-1]).decode(), flush=True)

    for passed in train_in_one_process(configuration, threads=threads, measure=measure):
        seconds = passed
    return meter.points


def summarise(points: Sequence[Point]) -> dict[str, float | None]:
    """The end of a curve, its least, and when it was below the limit."""
    windows = [points[start : start + IN_A_ROW] for start in range(1, len(points) - IN_A_ROW + 1)]
    below = next((part[0] for part in windows if all(each.mean < LIMIT for each in part)), None)
    return {
        "start": points[0].newest,
        "end": points[-1].mean,
        "end_newest": points[-1].newest,
        "least": min(each.mean for each in points),
        "seconds": points[-1].seconds,
        "to_limit": below.seconds if below else None,
        "steps_to_limit": below.step if below else None,
    }


def measure_seed(given: argparse.Namespace, seed: int, options: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": seed, "load": round(os.getloadavg()[0], 1)}
    configuration = load_settings(seed, options)
    if given.run:
        found["run"] = measure_run(given.run, given.every, configuration)
    elif not given.no_run:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            folder = Path(given.keep or temporary) / f"kuhn-{seed}"
            folder.mkdir(parents=True)
            found["command"] = round(start_run(folder, seed, options), 1)
            run = folder / ".fleetbus" / "runs" / "kuhn"
            found["run"] = measure_run(run, given.every, configuration)
            found["saved"] = read_saved(run / "model", configuration)
    for threads in given.loop_threads:
        found[f"loop_{threads}"] = run_loop(configuration, threads, given.every, quiet=given.json)
    return found


def divide(one: float | None, other: float | None) -> float | None:
    return round(one / other, 2) if one and other else None


def print_table(found: dict[str, Any], as_json: bool) -> None:
    curves = {name: points for name, points in found.items() if name == "run" or name.startswith("loop_")}
    summaries = {name: summarise(points) for name, points in curves.items()}
    for name, summary in summaries.items():
        if "run" in summaries and name != "run":
            summary["ratio"] = divide(summaries["run"]["seconds"], summary["seconds"])
            summary["ratio_to_limit"] = divide(summaries["run"]["to_limit"], summary["to_limit"])
        if not as_json:
            line = "  ".join(f"{key} {value}" for key, value in summary.items())
            facts = "  ".join(f"{key} {found[key]}" for key in ("seed", "load", "command", "saved") if key in found)
            print(f"{facts}  {name}  {line}", flush=True)
            print("   ", " ".join(f"{point.step}:{point.newest:.3f}/{point.mean:.3f}" for point in curves[name]), flush=True)
    if as_json:
        print(msgspec.json.encode(found | {"summary": summaries}).decode(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--every", type=int, default=5, help="steps between measurements")
    parser.add_argument("--run", type=Path, help="folder of a finished run")
    parser.add_argument("--no-run", action="store_true", help="the loop alone")
    parser.add_argument(
        "--loop-threads", type=int, nargs="*", default=[1, os.cpu_count() or 1], help="a loop for each; none: no loop"
    )
    parser.add_argument("--keep", type=Path, help="a folder that keeps the runs")
    parser.add_argument("--json", action="store_true")
    given, options = parser.parse_known_args()
    for seed in given.seeds:
        print_table(measure_seed(given, seed, options), given.json)


if __name__ == "__main__":
    main()
