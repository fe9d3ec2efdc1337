"""``fleetbus evaluate RUN``: held-out tasks played with the newest version of the policy; pass@k, per environment."""

import sys
from functools import partial
from typing import Any

import click
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.core.training.evaluation_summary import find_interval
from fleetbus.errors import UserError
from fleetbus_workers.api.evaluation import Evaluation, evaluate_run
from fleetbus_workers.api.model_evaluation import evaluate_model
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.cli.look.run_options import reach_options, run_argument
from fleetbus_workers.cli.options import NumberRange, load_settings
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.environment.adapters.foreign.benchmarks import Benchmark, load_benchmark
from fleetbus_workers.observe.run.formatting import format_interval


@click.command("evaluate")
@run_argument
@click.option(
    "--model",
    "run__model",
    metavar="NAME",
    help="Instead of a run a model: folder, checkpoint's model folder, GGUF file, smollm2, id on the Hugging Face Hub",
)
@click.option("--environment", "run__environment", metavar="SPEC", multiple=True, help="With --model: the environment")
@click.option("--seat", "run__seats", metavar="SEAT=...", multiple=True, help="Seat that another policy plays [the run's]")
@click.option("--recipe", metavar="NAME", help="With --model: environment, tasks and settings of a recipe")
@click.option(
    "--benchmark",
    metavar="NAME",
    help="Tasks of a benchmark instead of the run's: bfcl-multi-turn ['... split=held_out'], tau2-retail, tau2-airline",
)
@click.option(
    "--environment-python", "environment__python", metavar="PATH", help="Interpreter that has the package of the benchmark"
)
@click.option("--tasks", "run__tasks", metavar="FILE", help="Tasks file; its held-out tasks are played (default: the run's)")
@click.option("--episodes", type=click.IntRange(1), metavar="N", help="Held-out tasks to play (default: the run's setting)")
@click.option("--samples", type=click.IntRange(1), default=1, metavar="N", help="Episodes per task [1]")
@click.option("--k", "ks", default="", metavar="K,K", help="The k of pass@k [1 and the number of samples]")
@click.option("--temperature", type=NumberRange(0), metavar="NUMBER", help="Sampling temperature; 0: greedy [the run's]")
@click.option(
    "--inference-engine", "inference__engine", metavar="NAME", help="Engine of the worker that this command starts [the run's]"
)
@json_option("the report")
@reach_options
def command(
    run: str | None,
    episodes: int | None,
    samples: int,
    ks: str,
    temperature: float | None,
    as_json: bool,
    recipe: str | None,
    benchmark: str | None,
    **values: Any,
) -> int:
    """Play held-out tasks with the newest version of a run's policy, or with a model that no run has trained.

    While the run is active, its own workers play them; otherwise the command starts a server and one worker of each kind
    for the duration of the evaluation. The episodes are never trained on. While a learner publishes new versions, no version
    can be pinned, and the report names those that answered. Of a benchmark all tasks are played, or --episodes of them.
    """
    from fleetbus.logs.setup import configure_logs

    if benchmark is not None and (recipe is not None or values.get("run__environment") or values.get("run__tasks")):
        raise UserError("--benchmark has its own environment and tasks: leave out --recipe, --environment and --tasks")
    chosen = _parse_ks(ks, samples)
    of_model = recipe is not None or bool(values.get("run__model"))
    if of_model:
        if run is not None:
            raise UserError(f"--model and --recipe take the place of a run: leave out {run}")
        configuration, played = _read_model_settings(values, recipe, episodes, benchmark)
    else:
        if values.get("run__environment"):
            raise UserError("--environment goes with --model: a run has its own")
        configuration, played = _read_run_settings({**values, "run__name": run}, benchmark)
    configure_logs(configuration.log, run=configuration.run.name, role="evaluate", worker="evaluate")
    evaluate = partial(
        evaluate_model if of_model else evaluate_run,
        configuration,
        episodes=episodes,
        benchmark=played,
        samples=samples,
        ks=chosen,
        temperature=temperature,
        on_progress=_ignore_progress if as_json or not sys.stderr.isatty() else _print_progress,
    )
    report: Evaluation = run_async(evaluate)
    if report.missing:
        count = report.missing + report.all.episodes
        print(
            f"{report.missing} of {count} episodes were not asked for: no worker claimed the rest within limits.episode; "
            "start more environment workers",
            file=sys.stderr,
        )
    print_json(report) if as_json else _print(report)
    return 0


def _read_model_settings(
    values: dict[str, Any], recipe: str | None, episodes: int | None, benchmark: str | None
) -> tuple[Configuration, Benchmark | None]:
    """The settings that `up` would train the model with, those of a benchmark where it is played. Raises `UserError`."""
    from fleetbus_workers.up.command import check_run
    from fleetbus_workers.up.recipes import find_recipe

    flags = {**values, "evaluation__episodes": episodes, "run__name": "evaluate"}
    tables = find_recipe(recipe).build_tables() if recipe is not None else None
    loaded = load_settings(flags, earlier=False, recipe=tables)
    if benchmark is None:
        return check_run(loaded, fresh=True)[0], None
    played = load_benchmark(benchmark, loaded.configuration.environment.python)
    loaded = msgspec.structs.replace(loaded, configuration=played.fit(loaded.configuration, loaded.given))
    configuration, _ = check_run(loaded, fresh=True, local_environment=True)  # it was loaded, and has tasks of its own
    return _fit(played, configuration, loaded.given), played


def _read_run_settings(values: dict[str, Any], benchmark: str | None) -> tuple[Configuration, Benchmark | None]:
    """The settings of a run; those of a benchmark where it is played. Raises `UserError`."""
    loaded = load_settings(values)
    if benchmark is None:
        return loaded.configuration, None
    played = load_benchmark(benchmark, loaded.configuration.environment.python)
    return _fit(played, loaded.configuration, loaded.given), played


def _fit(benchmark: Benchmark, configuration: Configuration, given: dict[str, str]) -> Configuration:
    from fleetbus_workers.up.model_limits import read_context_length

    return benchmark.fit(configuration, given, context=read_context_length(find_model_folder(configuration.run)))


def _parse_ks(text: str, samples: int) -> list[int]:
    if not text:
        return sorted({1, samples})
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= samples for part in parts):
        raise UserError(f"--k {text}: give whole numbers from 1 to --samples {samples}, separated by commas")
    return sorted({int(part) for part in parts})


def _print_progress(done: int, count: int) -> None:
    print(f"\r{done} of {count} episodes", end="" if done < count else "\n", file=sys.stderr, flush=True)


def _ignore_progress(done: int, count: int) -> None:
    """Discard progress."""


def _print(report: Evaluation) -> None:
    versions = ", ".join(map(str, report.all.versions)) or "-"
    pinned = "" if report.pinned else f"; answered by {versions} while training went on"
    print(f"run {report.run}, version {report.version} after {report.step} steps{pinned}")
    if (of := report.benchmark) is not None:
        print(f"  benchmark {of.name}: {of.package} {of.version}, {of.digest}, {of.tasks} tasks")
    low, high = find_interval(report.all.success, report.all.graded, report.all.tasks)
    how = "greedy" if report.temperature == 0 else "sampled"
    print(f"  success {report.all.success:.1%} {how} (95%: {format_interval((low, high))}) of {report.all.tasks} tasks")
    shown = {"all": report.all} | {name or "-": summary for name, summary in report.environments.items()}
    for name, summary in shown.items() if len(shown) > 2 else (("all", report.all),):
        passed = "  ".join(f"pass@{k} {value:.3f}" for k, value in summary.pass_at.items())
        others = "  ".join(f"{count} {outcome}" for outcome, count in summary.not_graded.items())
        share = format_interval(find_interval(summary.success, summary.graded, summary.tasks))
        print(
            f"  {name:<24} {summary.graded} of {summary.episodes} graded  success {summary.success:.1%} ({share})  "
            f"reward {summary.mean_reward:.3f}  {passed}  {others}"
        )
