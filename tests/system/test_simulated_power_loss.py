"""A simulated server that loses its newest entries: what a run promises for that case holds, and faults in it are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.run import run_seed
from tests.simulation.seed_pool import run_seeds
from tests.support import planted_in_losses as losses

pytestmark = pytest.mark.integration

SEEDS = range(1, 7)
MANY_SEEDS = range(1, 301)

PLANTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[int, str]] = {
    losses.versions_of_the_log_alone: (11, "version numbers never repeat"),
    losses.checkpoints_of_the_log_alone: (16, "a lineage begins at a stored checkpoint"),
    losses.archive_continued_over_other_entries: (1, "every entry is in the log or in the archive"),
    losses.lost_entries_not_named: (1, "the audit names what was lost"),
}
"""Faults, and the seed and the invariant that found them."""


@pytest.mark.timeout(300)
def test_seeds_that_lose_power_keep_what_a_run_promises() -> None:
    assert list_failures(SEEDS) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_seeds_that_lose_power_keep_what_a_run_promises() -> None:
    assert list_failures(MANY_SEEDS) == {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plant",
    PLANTS,
    ids=lambda plant: plant.__name__,
)
def test_the_simulation_finds(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seed, invariant = PLANTS[plant]
    plant(monkeypatch)
    assert invariant in {violation.invariant for violation in run_seed(seed, faults="power").violations}


def list_failures(seeds: range) -> dict[int, str]:
    reports = run_seeds(seeds, processes=2, faults="power")
    return {report.seed: "; ".join(map(str, report.violations)) for report in reports if not report.passed}
