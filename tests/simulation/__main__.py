"""``just sim``: a whole fleet under virtual time and seeded faults. Exit status 0: all invariants held; 1: some did not."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.command.exit_status import CRASHED, FINISHED, REFUSED

if TYPE_CHECKING:
    from tests.simulation.run import Report
    from tests.simulation.scenario.shape import FaultSet

SHOWN_VIOLATIONS = 5
LARGEST_SEED = (1 << 63) - 1
"""Messages carry it."""

PROCESSES = 2


@click.command("sim")
@click.option("--seed", type=click.IntRange(0, LARGEST_SEED), metavar="N", help="Simulate one seed and report what happened")
@click.option("--seeds", metavar="A-B", help="Simulate seeds A to B and list those that fail")
@click.option(
    "--processes", type=click.IntRange(min=1), default=min(PROCESSES, os.cpu_count() or 1), help="Processes for --seeds"
)
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="With --seed: write every event to FILE"
)
@click.option(
    "--faults",
    type=click.Choice(["usual", "all", "swarm", "power", "rare", "learners"]),
    default="usual",
    help="all: also clocks, elections, replicas and disks, and clients of sessions; swarm: configurations, too; "
    "power: the usual ones, and a server that loses its newest entries; rare: swarm, and what hardly ever happens; "
    "learners: all or swarm, with a second policy that a learner of its own trains",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per seed")
def command(seed: int | None, seeds: str | None, processes: int, trace: Path | None, faults: FaultSet, as_json: bool) -> int:
    """Run the real workers together in one thread, under virtual time, with faults generated from the seed.

    Crashes and restarts of every role and of the server, pauses, cut connections, delayed, lost and repeated messages, hanging
    and failing environments. A hundred episodes take about a second. The same seed gives the same events.
    """
    if (seed is None) == (seeds is None):
        raise UserError("give either --seed N or --seeds A-B")
    if seeds is not None:
        return _run_many(parse_seeds(seeds), processes, faults, as_json)
    assert seed is not None
    return _run_one(seed, trace, faults, as_json)


def parse_seeds(text: str) -> range:
    """``A-B``, both included; raises `UserError`."""
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None or not int(found[1]) <= int(found[2]) <= LARGEST_SEED:
        raise UserError(f"--seeds {text} must be A-B with A not above B, and B below 2**63, for example 0-99")
    return range(int(found[1]), int(found[2]) + 1)


def _run_one(seed: int, trace: Path | None, faults: FaultSet, as_json: bool) -> int:
    from tests.simulation.run import run_seed

    if trace is not None:
        _check_writable(trace)
    report = run_seed(seed, keep_lines=trace is not None, faults=faults)
    if trace is not None:
        trace.write_text("\n".join(report.lines) + "\n")
    if as_json:
        _print_json(report)
        return FINISHED if report.passed else CRASHED
    print(f"seed {seed}: {'all invariants held' if report.passed else 'FAILED'}, trace {report.trace_hash}")
    print(
        f"  {report.virtual_seconds:.0f} virtual seconds in {report.cpu_seconds:.2f} s of CPU: {report.turns} turns, "
        f"{report.attempts} attempts, {report.entries} entries"
    )
    for title, counts in (("outcomes", report.outcomes), ("faults", report.disturbances)):
        print(f"  {title}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items())) or 'none'}")
    _print_violations(report)
    return FINISHED if report.passed else CRASHED


def _check_writable(trace: Path) -> None:
    try:
        trace.open("a").close()
    except OSError as error:
        raise UserError(f"--trace {trace} cannot be written ({error.strerror}): give another file") from error


def _run_many(seeds: range, processes: int, faults: FaultSet, as_json: bool) -> int:
    from tests.simulation.seed_pool import run_seeds

    started = time.monotonic()
    failed: list[int] = []
    cpu_seconds = 0.0
    for done, report in enumerate(run_seeds(seeds, processes=processes, faults=faults), start=1):
        cpu_seconds += report.cpu_seconds
        if as_json:
            _print_json(report)
        elif not report.passed:
            print(f"seed {report.seed} FAILED")
            _print_violations(report)
        if not report.passed:
            failed.append(report.seed)
        _show_progress(done, len(seeds), len(failed))
    if not as_json:
        listed = f"failed: {' '.join(map(str, sorted(failed)))}" if failed else "none failed"
        mean = cpu_seconds / len(seeds)
        print(f"{len(seeds)} seeds in {time.monotonic() - started:.0f} s, {mean:.2f} s of CPU each; {listed}")
    return CRASHED if failed else FINISHED


def _print_violations(report: Report) -> None:
    for violation in report.violations[:SHOWN_VIOLATIONS]:
        print(f"  at {violation.at:.3f} s: {violation.invariant}: {violation.detail}")
    if report.violations:
        print(f"  all events: just sim --seed {report.seed} --trace FILE")


def _print_json(report: Report) -> None:
    print(msgspec.json.encode(msgspec.structs.replace(report, lines=())).decode())


def _show_progress(done: int, total: int, failed: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total} seeds, {failed} failed", end="\n" if done == total else "", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, by default the process's; a mistake in it is one line and exit status 2."""
    try:
        result = command.main(args=arguments, prog_name="just sim", standalone_mode=False)
    except click.ClickException as error:
        message = error.format_message()
    except UserError as error:
        message = str(error)
    else:
        return result if isinstance(result, int) else FINISHED
    print(f"error: {message}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())
