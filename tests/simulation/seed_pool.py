"""Many seeds, on several processes; each seed gives the same report wherever and after whatever it runs."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from functools import partial

from tests.simulation.observer import Violation
from tests.simulation.run import Report, run_seed
from tests.simulation.scenario.shape import FaultSet

SEEDS_AT_A_TIME = 4
"""Seeds that a process takes at once."""


def run_seeds(seeds: Sequence[int], *, processes: int, faults: FaultSet = "usual") -> Iterator[Report]:
    """The reports of all seeds as they come; with one process in order, in this process."""
    if processes == 1:
        yield from map(partial(run_safely, faults=faults), seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(partial(run_safely, faults=faults), seeds, chunksize=SEEDS_AT_A_TIME)


def run_safely(seed: int, faults: FaultSet = "usual") -> Report:
    """The seed's report, even when the simulation itself fails: the other seeds continue."""
    try:
        return run_seed(seed, faults=faults)
    except Exception as error:  # the boundary between one seed and the next
        detail = "".join(traceback.format_exception(error, limit=-6))
        return Report(seed=seed, violations=(Violation(invariant="the simulation itself runs", at=0.0, detail=detail),))
