"""``fleetbus compare ONE OTHER``: two evaluations task by task. Exit status 0: done; 2: bad input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus_workers.cli.look.run_options import reach_options
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import build_table, json_option, print_json, print_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.sources import is_recording, open_source

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.core.diagnosis.comparison import Comparison, Graded
    from fleetbus.core.diagnosis.intervals import Interval

SHOWN = 10


@click.command("compare")
@click.argument("one", metavar="ONE[@EVALUATION]")
@click.argument("other", metavar="OTHER[@EVALUATION]")
@click.option("--limit", type=click.IntRange(0), default=SHOWN, show_default=True, help="Tasks shown at each end; 0: all")
@json_option("the comparison")
@reach_options
def command(one: str, other: str, limit: int, as_json: bool, **values: Any) -> int:
    """Compare held-out episodes of two runs or recordings, or of two evaluations of one, task by task.

    An EVALUATION is start, step40, end, end_greedy and so on; without one it is the newest that was sampled. Differences are
    OTHER less ONE, paired by task, with an interval of 95 % over tasks. Exit status 0: done; 2: bad input.
    """
    from fleetbus.core.diagnosis.comparison import compare, find_evaluation

    asked = [(each, "") if Path(each).is_file() else _split(each) for each in (one, other)]
    graded = {source: _read_source(source, values) for source in dict.fromkeys(source for source, _ in asked)}
    (first, before), (second, after) = (find_evaluation(source, evaluation, graded[source]) for source, evaluation in asked)
    found = compare(before, after, names=(first, second))
    print_json(msgspec.to_builtins(found)) if as_json else _print(found, limit)
    return FINISHED


def _read_source(source: str, values: dict[str, Any]) -> list[Graded]:
    given = {} if is_recording(source) else {"run__name": source}
    return run_async(_read_graded, source, load_settings({**values, **given}).configuration)


def _split(text: str) -> tuple[str, str]:
    source, mark, evaluation = text.rpartition("@")
    return (source, evaluation) if mark else (text, "")


async def _read_graded(source: str, configuration: Configuration) -> list[Graded]:
    from fleetbus.core.diagnosis.comparison import GradedFold
    from fleetbus.log.stored_entries import read_stored

    fold = GradedFold(success_threshold=configuration.evaluation.success_threshold)
    async with open_source(source, configuration) as opened:
        async for entry in opened.entries([opened.subjects.episodes]):
            fold.apply(read_stored(entry))
        if opened.torn:
            click.echo(f"fleetbus: {opened.torn}", err=True)
    return fold.build()


def _print(found: Comparison, limit: int) -> None:
    print(f"{found.other} less {found.one}, over {len(found.tasks):,} tasks that both graded")
    for name, size in (("reward", found.reward), ("success", found.success)):
        print(f"  {name:8} {_format(size)}")
    if found.only_one or found.only_other:
        print(f"  left out: {found.only_one:,} tasks of the first alone, {found.only_other:,} of the second alone")
    chosen = found.tasks if not limit or len(found.tasks) <= 2 * limit else (*found.tasks[:limit], *found.tasks[-limit:])
    table = build_table("task", right="first,second,difference,episodes")
    for each in chosen:
        counts = f"{each.episodes[0]}, {each.episodes[1]}"
        table.add_row(each.task, f"{each.one:.3f}", f"{each.other:.3f}", f"{each.difference:+.3f}", counts)
    print_table(table)
    if len(chosen) < len(found.tasks):
        print(f"{len(chosen)} of {len(found.tasks):,} tasks shown, those that lost most and gained most (--limit 0: all)")


def _format(size: Interval | None) -> str:
    return "no task in both" if size is None else f"{size.value:+.3f} ({size.low:+.3f} to {size.high:+.3f})"
