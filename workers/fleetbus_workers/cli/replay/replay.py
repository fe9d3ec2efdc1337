"""``fleetbus replay FILE --role ROLE``: does a worker still publish what was recorded? 0: yes; 1: no; 2: bad input."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED

if TYPE_CHECKING:
    from fleetbus_workers.replay import Report
    from fleetbus_workers.replay.progress import Progress

ROLES = ("environment", "inference", "learner")

UNITS = {"environment": "episodes", "inference": "actions", "learner": "messages"}
"""What progress counts, by role."""

LINE_WIDTH = 79
"""Columns of the line with the progress."""


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--role", type=click.Choice(ROLES), default="environment", show_default=True, help="Worker to test")
@click.option("--speed", default="max", show_default=True, metavar="max|N", help="Replay at N times the recorded speed")
@click.option(
    "--environment", metavar="SPEC", help="Environment to play on (default: the recorded one, if it ships with fleetbus)"
)
@click.option("--model", type=click.Path(path_type=Path, file_okay=False), help="Model folder (default: the starter policy)")
@click.option(
    "--weights",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder with the published weights, if the recorded path and the recording lack them",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="TYPE.FIELD",
    help="An additional field that may differ, such as EpisodeFinished.error; repeatable",
)
@click.option("--tolerance", type=float, default=1e-3, show_default=True, help="Tolerance for log-probabilities")
@click.option(
    "--patience",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds without output after which a worker counts as hanging",
)
@click.option(
    "--until",
    type=click.Choice(("batches", "weights")),
    default="weights",
    show_default=True,
    help="Learner: weights also trains; batches compares requests, advantages and batches only and needs no model",
)
@click.option("--distinct", is_flag=True, help="Environment: play episodes with the same task, actions and outcome once")
@click.option(
    "--sample-again",
    is_flag=True,
    help="Inference: sample every token instead of checking the recorded tokens with a forward pass",
)
@click.option(
    "--policy", default="", metavar="NAME", help="Inference: compare the turns of this policy, of a seat that is trained"
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 32),
    metavar="N",
    help="Processes that replay episodes in parallel, for environment and inference (default: one per CPU for large files)",
)
@click.option(
    "--trust-recording",
    is_flag=True,
    help="The file is yours: use the environment, engine, model and weights that it names, which may run code and call servers",
)
@json_option("the report")
def command(file: Path, as_json: bool, **values: Any) -> int:
    """Feed one worker its recorded inputs and compare what it publishes, field by field.

    Workers, lanes, paths, times and durations may differ; everything else must be equal. Exit status 0: the replay is equal to
    the recording; 1: it is not, with the first difference; 2: bad input.
    """
    report = run_async(partial(_run_replay, file, **values))
    if as_json:
        facts = {"same": report.same, "first": report.first} | msgspec.to_builtins(report)
        print_json(facts)
    else:
        print("\n".join(report.lines()))
    return FINISHED if report.same else CRASHED


async def _run_replay(
    file: Path,
    *,
    role: Any,
    speed: str,
    environment: str | None,
    model: Path | None,
    weights: Path | None,
    ignore: tuple[str, ...],
    tolerance: float,
    patience: float,
    jobs: int | None,
    until: Any,
    sample_again: bool,
    distinct: bool,
    policy: str,
    trust_recording: bool,
) -> Report:
    from fleetbus_workers.replay import Replay, replay_recording
    from fleetbus_workers.replay.progress import Progress

    replay = Replay(
        role=role,
        environment=environment,
        model=model,
        weights=weights,
        speed=_parse_speed(speed),
        ignored=frozenset(ignore),
        tolerance=tolerance,
        patience_seconds=patience,
        jobs=jobs,
        until=until,
        sample_again=sample_again,
        distinct=distinct,
        policy=policy,
        trusted=trust_recording,
    )
    if policy and role != "inference":
        raise UserError("--policy chooses what an inference worker samples: give --role inference, or leave it out")
    if role == "learner" and jobs is not None and jobs > 1:
        raise UserError("--jobs: a learner needs all episodes in one process: leave it out")
    progress = Progress()
    async with _show_progress(progress, role):
        report = await replay_recording(file, replay, progress)
    if report.torn:
        click.echo(f"fleetbus: {report.torn}", err=True)
    return report


@asynccontextmanager
async def _show_progress(progress: Progress, role: str) -> AsyncIterator[None]:
    """On a terminal one line with the progress, removed at the end; elsewhere nothing."""
    from fleetbus_workers.replay.progress import report_regularly

    if not sys.stderr.isatty():
        yield
        return
    began = time.monotonic()

    async def show() -> None:
        seconds = time.monotonic() - began
        counted = f"{progress.done:,} of {progress.total:,} {UNITS[role]}" if progress.total else "reading and loading"
        click.echo(f"\r{role}: {counted}, {seconds:.0f} s".ljust(LINE_WIDTH), nl=False, err=True)

    try:
        async with report_regularly(show):
            yield
    finally:
        click.echo(f"\r{' ' * LINE_WIDTH}\r", nl=False, err=True)


def _parse_speed(text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if speed <= 0:
        raise UserError(f"--speed {text}: give max, or a number above 0 such as 1 (as recorded) or 10")
    return speed
