"""Which branches of the delivery contract simulations reach by themselves, and which seeds reach what no seed before did.

    python benchmarks/simulation_coverage.py                     # the kept seeds: tests/system/simulation_corpus.txt
    python benchmarks/simulation_coverage.py all:1-100 swarm:1-50
    python benchmarks/simulation_coverage.py --keep all:1-500    # and keep the seeds that reach something new

Prints per file lines and branches, with those that were not reached; exit status 1 below ``--at-least`` percent in total.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coverage import Coverage

if TYPE_CHECKING:
    from fleetbus_workers.simulation.scenario import FaultSet

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests/system/simulation_corpus.txt"

CONTRACT = (
    "fleetbus/core/audit.py",
    "fleetbus/core/audit_episode.py",
    "fleetbus/core/audit_training.py",
    "fleetbus/core/capacity.py",
    "fleetbus/core/claims.py",
    "fleetbus/core/groups.py",
    "fleetbus/core/history.py",
    "fleetbus/core/journal.py",
    "fleetbus/core/ledger.py",
    "fleetbus/core/lineage.py",
    "fleetbus/core/retention.py",
    "fleetbus/core/reward_bounds.py",
    "fleetbus/actions.py",
    "fleetbus/episodes.py",
    "fleetbus/lanes.py",
    "fleetbus/leases.py",
    "fleetbus/requests.py",
    "fleetbus/slots.py",
    "fleetbus/trim_limit.py",
    "workers/fleetbus_workers/environment/episode/attempts.py",
    "workers/fleetbus_workers/environment/episode/policy_client.py",
    "workers/fleetbus_workers/environment/stepwise/host.py",
    "workers/fleetbus_workers/environment/stepwise/journal_log.py",
    "workers/fleetbus_workers/environment/stepwise/orphan_sweep.py",
    "workers/fleetbus_workers/environment/stepwise/session.py",
    "workers/fleetbus_workers/learner/admission.py",
    "workers/fleetbus_workers/learner/checkpoint_choice.py",
    "workers/fleetbus_workers/learner/journal.py",
    "workers/fleetbus_workers/learner/pool.py",
    "workers/fleetbus_workers/learner/resume.py",
    "workers/fleetbus_workers/recorder/log_trimmer.py",
)
"""What decides about delivery: who may do what next, and what counts. Formulae and prompts are not part of it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", metavar="FAULTS:A-B", help="instead of the kept seeds")
    parser.add_argument("--keep", action="store_true", help="add the seeds that reach something new to the kept ones")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT")
    arguments = parser.parse_args()
    coverage = Coverage(branch=True, include=[str(ROOT / file) for file in CONTRACT], data_file=None, config_file=False)
    kept = read_corpus()
    coverage.start()
    new = [seed for seed in dict.fromkeys([*kept, *parse_seeds(arguments.seeds)]) if reaches_new(coverage, seed)]
    coverage.stop()
    if arguments.keep:
        CORPUS.write_text("".join(f"{faults} {seed}\n" for faults, seed in new))
        print(f"{len(new)} seeds kept, {len(kept)} before", file=sys.stderr)
    coverage.report(file=(text := io.StringIO()), show_missing=True, skip_covered=False)
    print(text.getvalue().replace(f"{ROOT}/", ""))
    return int(coverage.report(file=io.StringIO()) < arguments.at_least)


def read_corpus() -> list[tuple[FaultSet, int]]:
    """The kept seeds, in the order in which they were found."""
    lines = CORPUS.read_text().splitlines() if CORPUS.exists() else []
    return [(faults, int(seed)) for faults, seed in map(str.split, lines)]  # type: ignore[misc]


def parse_seeds(ranges: list[str]) -> Iterator[tuple[FaultSet, int]]:
    """``all:1-100`` as its seeds."""
    for text in ranges:
        faults, _, seeds = text.partition(":")
        first, _, last = seeds.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            yield faults, seed  # type: ignore[misc]


_reached: set[tuple[Any, ...]] = set()


def reaches_new(coverage: Coverage, seed: tuple[FaultSet, int]) -> bool:
    """Run a seed; True if it reached a branch that none before it did."""
    from fleetbus_workers.simulation.seed_pool import run_safely

    before = len(_reached)
    report = run_safely(seed[1], seed[0])
    if not report.passed:
        print(f"{seed[0]} {seed[1]}: {report.violations[0].invariant}: {report.violations[0].detail}", file=sys.stderr)
    data = coverage.get_data()
    for file in data.measured_files():
        _reached.update((file, *arc) for arc in data.arcs(file) or ())
    if len(_reached) > before:
        print(f"{seed[0]} {seed[1]}: {len(_reached) - before} new branches", file=sys.stderr)
    return len(_reached) > before


if __name__ == "__main__":
    sys.exit(main())
