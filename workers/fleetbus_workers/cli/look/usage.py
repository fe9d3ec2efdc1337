"""``fleetbus usage RUN|FILE``: tokens, calls and hours of a run, by what became of them. Exit status 0: done; 2: bad input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import build_table, json_option, print_json, print_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.sources import is_recording, open_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetbus.config.settings import Configuration
    from fleetbus.recording.usage import Usage

ROLES = ("environment", "inference", "learner")
KINDS = frozenset({"task", "act", "episode", "train"})


@click.command("usage")
@source_argument
@archive_option("; without a server it is read alone")
@click.option(
    "--gpus", "gpus", multiple=True, metavar="ROLE=N", help="GPUs of each worker of a role, for GPU hours; repeatable"
)
@json_option("the usage")
@reach_options
def command(source: str | None, archive: Path | None, gpus: tuple[str, ...], as_json: bool, **values: Any) -> int:
    """Count what a run has used: episodes, calls and tokens by what became of them, hours by worker, seconds by environment.

    A worker's hours are those between its first and its last entry in the log; a gap beyond an hour is not counted. Exit status
    0: done; 2: bad input.
    """
    per_worker = _read_gpus(gpus)
    given = {} if is_recording(source) else {"run__name": source}
    configuration = load_settings({**values, **given}).configuration
    usage, torn = run_async(_count, source or "", configuration, archive)
    if torn:
        click.echo(f"fleetbus: {torn}", err=True)
    hours = sum(each.hours * per_worker.get(each.role, 0.0) for each in usage.workers)
    if as_json:
        print_json(msgspec.to_builtins(usage) | ({"gpu_hours": hours} if per_worker else {}))
    else:
        _print(usage, source or configuration.run.name)
        if per_worker:
            print(f"{hours:.2f} GPU hours ({', '.join(f'{role} {count:g}' for role, count in per_worker.items())} a worker)")
    return FINISHED


def _read_gpus(given: Sequence[str]) -> Mapping[str, float]:
    found = {}
    for each in given:
        role, _, count = each.partition("=")
        if role not in ROLES or not count.replace(".", "", 1).isdecimal():
            raise UserError(f"--gpus {each}: write ROLE=N with a role of {', '.join(ROLES)}, for example --gpus learner=8")
        found[role] = float(count)
    return found


async def _count(source: str, configuration: Configuration, archive: Path | None) -> tuple[Usage, str]:
    from fleetbus.recording.usage import UsageFold

    fold = UsageFold()
    async with open_source(source, configuration, archive) as opened:
        async for message, entry in opened.messages(KINDS, configuration.run.policy):
            fold.apply(message, entry.sequence, entry.time_ns)
        torn = opened.torn
    return fold.build(), torn


def _print(usage: Usage, name: str) -> None:
    from fleetbus.recording.usage import Used

    print(f"run {name}: {usage.steps:,} steps that count, {usage.hours:.2f} hours from the first to the last entry")
    total = Used()
    table = build_table("use", right="episodes,calls,tool calls,sampled tokens,prompt tokens,call seconds")
    for use, used in usage.by_use.items():
        total.add(used)
        table.add_row(use, *_format(used))
    table.add_row("all", *_format(total))
    print_table(table)
    table = build_table("role,worker", right="hours")
    for each in usage.workers:
        table.add_row(each.role, each.worker, f"{each.hours:.3f}")
    print_table(table)
    table = build_table("environment", right="episodes,seconds an episode")
    table.add_column("of these")
    for env in sorted(usage.environments, key=lambda env: -env.seconds):
        stages = sorted(env.stages.items(), key=lambda stage: -stage[1])
        table.add_row(env.env or "-", f"{env.episodes:,}", f"{env.seconds:.2f}", ", ".join(f"{s} {x:.2f}" for s, x in stages))
    print_table(table)


def _format(used: Any) -> list[str]:
    counts = (used.episodes, used.calls, used.tool_calls, used.sampled, used.prompt)
    return [*(f"{count:,}" for count in counts), f"{used.call_seconds:,.1f}"]
