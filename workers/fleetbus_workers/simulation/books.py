"""All books of one world: every entry that the server stores is traced and goes to the books of its kind."""

from __future__ import annotations

import anyio

from fleetbus.bus.base import Stored
from fleetbus_workers.simulation.episode_books import EpisodeBooks
from fleetbus_workers.simulation.judge import Judge
from fleetbus_workers.simulation.scenario import Scenario
from fleetbus_workers.simulation.training_books import TrainingBooks
from fleetbus_workers.simulation.watch import Watch


class Books:
    """``folder`` is where the run's files lie: a different one in every process, so it stays out of the trace."""

    def __init__(self, watch: Watch, judge: Judge, scenario: Scenario, folder: str) -> None:
        self._watch = watch
        self._judge = judge
        self._folder = folder.encode()
        self.entries: list[Stored] = []
        self.episodes = EpisodeBooks(watch, judge)
        self.episodes.is_trimmed = scenario.recorder
        self.training = TrainingBooks(
            watch,
            self.episodes,
            max_staleness=scenario.max_staleness,
            groups=scenario.groups,
            group_size=scenario.group_size,
        )
        judge.pages = self.episodes.pages

    def on_stored(self, entry: Stored) -> None:
        """One entry of the log, at the instant at which it is stored."""
        self.entries.append(entry)
        self.on_lane(entry)
        at = anyio.current_time()
        match entry.subject.split(".")[2]:
            case "task":
                pages = self.episodes.requested(entry, at)
                if pages is not None:
                    self.training.requested(pages)
            case "obs":
                self.episodes.observed(entry, at)
            case "act":
                self.episodes.acted(entry)
            case "episode":
                self.episodes.on_episode(entry, at)
            case "policy":
                self.training.published(entry)
                self._judge.newest_version = self.training.newest_version
            case "train":
                self.training.on_train(entry)

    def on_lane(self, entry: Stored) -> None:
        """An entry that only the trace takes."""
        self._watch.trace("stored", entry.sequence, entry.subject, payload=entry.payload.replace(self._folder, b""))

    def check_open(self) -> None:
        """Nobody waits for an outcome longer than promised."""
        at = anyio.current_time()
        for episode, pages in self.episodes.open.items():
            late = self._judge.seconds_late(pages, at)
            self._watch.require(late <= 0, "an outcome by deadline and grace", f"{episode}: none yet, {late:.1f} s late")
