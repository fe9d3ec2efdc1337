"""Checks that nothing grows for ever: what the log holds beside a recorder, and the checkpoints in the run's folder."""

from __future__ import annotations

from fleetbus.config.run_folder import run_folder
from tests.simulation.deployment.fixtures import SimulationFixtures

CHECKPOINTS_IN_WORK = 3
"""Beside those that are kept: one that is being written, one that a killed learner left, one that waits for its removal."""


class BoundsChecker:
    """`check` is called now and then; without a bound on entries the scenario is too short for any."""

    def __init__(self, fixtures: SimulationFixtures) -> None:
        self._fixtures = fixtures
        self.most_entries = self.most_checkpoints = 0

    def check(self) -> None:
        """Report what is above its bound, and remember the most that there ever was."""
        fixtures, bound = self._fixtures, self._fixtures.scenario.pace.most_entries
        if not bound:
            return
        folder, kept = run_folder(fixtures.configuration.run).checkpoints, fixtures.configuration.learner.keep_checkpoints
        checkpoints = len(list(folder.iterdir())) if folder.is_dir() else 0
        self.most_entries = max(self.most_entries, fixtures.log.count)
        self.most_checkpoints = max(self.most_checkpoints, checkpoints)
        fixtures.observer.require(fixtures.log.count <= bound, "the log is bounded", f"{fixtures.log.count} entries")
        right = checkpoints <= kept + CHECKPOINTS_IN_WORK
        fixtures.observer.require(right, "checkpoints are pruned", f"{checkpoints} of {kept} kept")
