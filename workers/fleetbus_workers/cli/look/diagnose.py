"""``fleetbus diagnose RUN|FILE``: why a run learns or does not. Exit status 0, with findings or without; 2: bad input."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import build_table, json_option, print_json, print_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.sources import is_recording, open_source

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.core.diagnosis.findings import Diagnosis
    from fleetbus.core.diagnosis.intervals import Interval

KINDS = frozenset({"task", "obs", "act", "episode", "train"})

LEAST_STEPS = 4
"""With a clean onset, until a finding is confirmed (docs/diagnose.md)."""


@click.command("diagnose")
@source_argument
@archive_option("; without a server it is read alone")
@json_option("the diagnosis")
@reach_options
def command(source: str | None, archive: Path | None, as_json: bool, **values: Any) -> int:
    """Say why a run learns or does not, from its log or from a recording: what is wrong, since which step, how large it is,
    and what to do.

    Reads the whole log and changes nothing. Every number has an interval of 95 %; findings are confirmed far beyond it, so that
    a healthy run has none (docs/diagnose.md). Exit status 0: done, with findings or without; 2: bad input.
    """
    given = {} if is_recording(source) else {"run__name": source}
    configuration = load_settings({**values, **given}).configuration
    found, torn = run_async(_diagnose, source or "", configuration, archive)
    if torn:
        click.echo(f"fleetbus: {torn}", err=True)
    print_json(msgspec.to_builtins(found)) if as_json else _print(found, source or configuration.run.name)
    return FINISHED


async def diagnose_source(source: str) -> Diagnosis:
    """The diagnosis of a recording, or of a run with the settings of the working folder."""
    found, _ = await _diagnose(source, load_settings({}).configuration, None)
    return found


async def _diagnose(source: str, configuration: Configuration, archive: Path | None) -> tuple[Diagnosis, str]:
    from fleetbus.core.diagnosis.diagnose import diagnose
    from fleetbus.core.diagnosis.fold import DiagnosisFold

    fold = DiagnosisFold()
    async with open_source(source, configuration, archive) as opened:
        async for message, entry in opened.messages(KINDS, configuration.run.policy):
            fold.apply(message, entry.sequence, entry.time_ns)
        torn = opened.torn
    return diagnose(fold.build()), torn


def _print(found: Diagnosis, name: str) -> None:
    print(f"run {name}, steps {found.first_step} to {found.last_step}, {found.episodes:,} settled episodes")
    table = build_table("measured over the newest steps", right="mean,95 % interval,beyond,steps")
    for each in found.measures:
        bound = "" if abs(each.bound) == float("inf") else f"{each.bound:g}"
        table.add_row(each.name, f"{each.size.value:.4g}", _format_interval(each.size), bound, str(each.steps))
    print_table(table)
    for reason in found.unmeasured:
        print(f"not measured: {reason}")
    for finding in found.findings:
        print(f"\n{finding.kind.upper().replace('_', ' ')} since step {finding.step}: {finding.meaning}")
        if finding.time_ns:
            began = datetime.datetime.fromtimestamp(finding.time_ns // 10**9)
            print(f"  began     {began:%Y-%m-%d %H:%M:%S}")
        print(f"  size      {finding.size.value:.4g} ({_format_interval(finding.size)}) {finding.unit}")
        print(f"  evidence  {finding.evidence}")
        print(f"  do        {finding.advice}")
    if not found.measures:
        print(f"`fleetbus episodes {name}` says what became of each episode")
        return
    is_short = found.last_step - found.first_step + 1 < LEAST_STEPS
    least = f" from so few steps: most of it takes {LEAST_STEPS} or more" if is_short else ""
    print("" if found.findings else f"nothing is wrong that this can tell{least}")


def _format_interval(size: Interval) -> str:
    return f"{size.low:.4g} to {size.high:.4g}"
