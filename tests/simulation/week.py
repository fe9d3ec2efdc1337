"""``just week``: seven simulated days of a run, with restarts of everything and every role under its own rights.

Exit status 0: all invariants held. A day takes some seconds of CPU; after `LIMIT_SECONDS` of them it stops by itself, with 1.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Sequence

import click

from fleetbus.errors import UserError
from fleetbus_workers.command.exit_status import CRASHED, FINISHED, REFUSED
from tests.simulation.run import Report, run_seed
from tests.simulation.scenario.days import DAY_SECONDS, draw_days
from tests.simulation.scenario.shape import Scenario

LIMIT_SECONDS = 540
"""Of CPU: nine minutes on a processor of its own."""


@click.command("week")
@click.option("--days", type=click.FloatRange(min=0.01, max=60), default=7.0, show_default=True, metavar="N")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=1, show_default=True, metavar="N")
def command(days: float, seed: int) -> int:
    """Play days of a run in one thread under virtual time, and report what happened."""
    stop_after(LIMIT_SECONDS)
    scenario = draw_days(seed, days)
    report = run_seed(seed, scenario=scenario)
    for line in describe(scenario, report):
        print(line)
    return FINISHED if report.passed else CRASHED


def stop_after(seconds: int) -> None:
    """The kernel ends this process when it has computed for so long, whatever it does then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, resource.RLIM_INFINITY))


def describe(scenario: Scenario, report: Report) -> list[str]:
    """What a person reads of it."""
    verdict = "all invariants held" if report.passed else "FAILED"
    lines = [
        f"seed {report.seed}: {verdict}; {report.virtual_seconds / DAY_SECONDS:.2f} days in {report.cpu_seconds:.0f} s of CPU",
        f"  {sum(report.outcomes.values())} episodes, {report.attempts} attempts, {report.turns} turns, {scenario.steps} steps",
        f"  {report.entries} entries, of which the log held {report.most_entries} at most; "
        f"{report.most_checkpoints} checkpoints at most",
        f"  outcomes: {_list_counts(report.outcomes)}",
        f"  processes started: {_list_counts(report.started)}",
        f"  faults: {_list_counts(report.disturbances)}",
    ]
    return lines + [f"  at {each.at / 3600:.2f} h: {each.invariant}: {each.detail}" for each in report.violations[:5]]


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(counts).items())) or "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; a mistake in it is one line and exit status 2."""
    try:
        result = command.main(args=arguments, prog_name="just week", standalone_mode=False)
    except (click.ClickException, UserError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"error: {message}", file=sys.stderr)
        return REFUSED
    return result if isinstance(result, int) else FINISHED


if __name__ == "__main__":
    sys.exit(main())
