"""Checks that nothing grows for ever: what the log holds beside a recorder, and the checkpoints in the run's folder."""

from __future__ import annotations

from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration
from tests.simulation.observer import Observer

CHECKPOINTS_IN_WORK = 3
"""Beside those that are kept: one that is being written, one that a killed learner left, one that waits for its removal."""


class BoundsChecker:
    """`check` is called now and then with the number of entries in the log; ``bound`` 0: the scenario is too short for any."""

    def __init__(self, observer: Observer, configuration: Configuration, bound: int) -> None:
        self._observer, self._bound, self._kept = observer, bound, configuration.learner.keep_checkpoints
        self._folder = run_folder(configuration.run).checkpoints
        self.most_entries = self.most_checkpoints = 0

    def check(self, entries: int) -> None:
        """Report what is above its bound, and remember the most that there ever was."""
        if not self._bound:
            return
        checkpoints = len(list(self._folder.iterdir())) if self._folder.is_dir() else 0
        self.most_entries, self.most_checkpoints = max(self.most_entries, entries), max(self.most_checkpoints, checkpoints)
        self._observer.require(entries <= self._bound, "the log is bounded", f"{entries} entries")
        right = checkpoints <= self._kept + CHECKPOINTS_IN_WORK
        self._observer.require(right, "checkpoints are pruned", f"{checkpoints} of {self._kept} kept")
