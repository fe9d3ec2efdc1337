"""Lists the branches of the delivery contract that simulations reach, and the few seeds that reach them all.

    python benchmarks/simulation_coverage.py                          # the kept seeds: tests/system/simulation_corpus.txt
    python benchmarks/simulation_coverage.py all:1-100 swarm:1-50     # more of them
    python benchmarks/simulation_coverage.py --keep all:1-500         # and keep the fewest that reach as much

Prints per file lines and branches, with those that were not reached; status 1 below ``--at-least`` percent of both.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coverage import Coverage

if TYPE_CHECKING:
    from tests.simulation.scenario.shape import FaultSet

Arc = tuple[str, tuple[int, int]]
Seed = tuple["FaultSet", int]

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests/system/simulation_corpus.txt"

CONTRACT = (
    "fleetbus/core/audit/books.py",
    "fleetbus/core/audit/episode.py",
    "fleetbus/core/audit/training.py",
    "fleetbus/core/training/capacity.py",
    "fleetbus/core/episode/claims.py",
    "fleetbus/core/training/groups.py",
    "fleetbus/core/episode/history.py",
    "fleetbus/core/episode/journal.py",
    "fleetbus/core/training/ledger.py",
    "fleetbus/core/training/lineage.py",
    "fleetbus/core/training/retention.py",
    "fleetbus/core/algorithms/reward_components.py",
    "fleetbus/log/actions.py",
    "fleetbus/log/episodes.py",
    "fleetbus/delivery/lanes.py",
    "fleetbus/delivery/leases.py",
    "fleetbus/delivery/requests.py",
    "fleetbus/delivery/slots.py",
    "workers/fleetbus_workers/recorder/trim_limit.py",
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
    parser.add_argument("seeds", nargs="*", metavar="FAULTS:A-B", help="beside the kept seeds")
    parser.add_argument("--keep", action="store_true", help="keep the fewest of these seeds that reach what all of them do")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT")
    arguments = parser.parse_args()
    coverage = Coverage(branch=True, include=[str(ROOT / file) for file in CONTRACT], data_file=None, config_file=False)
    imported = record_arcs(coverage, lambda: importlib.import_module("tests.simulation.run"))
    seeds = dict.fromkeys([*read_corpus(), *parse_seeds(arguments.seeds)])
    reached = {seed: record_arcs(coverage, partial(run_reported, *seed)) - imported for seed in seeds}
    if arguments.keep:
        CORPUS.write_text("".join(f"{faults} {seed}\n" for faults, seed in choose_fewest(reached)))
    everything = defaultdict(set)
    for file, arc in imported.union(*reached.values()):
        everything[file].add(arc)
    coverage.get_data().add_arcs(everything)
    coverage.report(file=(text := io.StringIO()), show_missing=True)
    print(text.getvalue().replace(f"{ROOT}/", ""))
    with tempfile.NamedTemporaryFile() as written:
        coverage.json_report(outfile=written.name)
        totals = json.loads(Path(written.name).read_bytes())["totals"]
    print(f"{len(seeds)} seeds; of branches alone {totals['covered_branches']} of {totals['num_branches']}")
    return int(coverage.report(file=io.StringIO()) < arguments.at_least)


def record_arcs(coverage: Coverage, function: Callable[[], object]) -> set[Arc]:
    """The branches that one call takes, by file."""
    coverage.erase()
    with coverage.collect():
        function()
    data = coverage.get_data()
    found = {(file, arc) for file in data.measured_files() for arc in data.arcs(file) or ()}
    coverage.erase()
    return found


def run_reported(faults: FaultSet, seed: int) -> None:
    from tests.simulation.seed_pool import run_safely

    report = run_safely(seed, faults)
    if not report.passed:
        print(f"{faults} {seed}: {report.violations[0].invariant}: {report.violations[0].detail}", file=sys.stderr)


def choose_fewest(reached: dict[Seed, set[Arc]]) -> list[Seed]:
    """Seeds that reach together what all do: again and again the one that adds most."""
    left, chosen = set().union(*reached.values()), list[Seed]()
    while left:
        chosen.append(max(reached, key=lambda seed: len(reached[seed] & left)))
        left -= reached[chosen[-1]]
    return chosen


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


if __name__ == "__main__":
    sys.exit(main())
