"""All log checkers of one world: every stored entry is traced and passed to the checker of its kind."""

from __future__ import annotations

import anyio

from fleetbus.bus.base import StreamEntry
from tests.simulation.judge.episode_checker import EpisodeChecker
from tests.simulation.judge.oracle import FaultOracle
from tests.simulation.judge.session_checker import SessionChecker
from tests.simulation.judge.training_checker import TrainingChecker
from tests.simulation.observer import GARBAGE, Observer
from tests.simulation.scenario.shape import POLICY, Scenario


class LogChecker:
    """``folder`` is where the run's files lie: a different one in every process, so it stays out of the trace."""

    def __init__(self, observer: Observer, oracle: FaultOracle, scenario: Scenario, folder: str) -> None:
        self._observer = observer
        self._oracle = oracle
        self._scenario = scenario
        self._folder = folder.encode()
        self.stored_at = 0.0
        """When the last entry of the log was stored."""
        self.entries: list[StreamEntry] = []
        self._open_books()

    def _open_books(self) -> None:
        observer, oracle, scenario = self._observer, self._oracle, self._scenario
        self.episodes = EpisodeChecker(observer, oracle)
        self.episodes.is_trimmed = scenario.recorder
        self.trainings = {
            policy: TrainingChecker(
                observer,
                self.episodes,
                policy=policy,
                is_calm=scenario.is_calm,
                max_staleness=scenario.max_staleness if scenario.stale_groups == "drop" else None,
                groups=scenario.groups,
                group_size=scenario.group_size,
                tasks=scenario.tasks,
            )
            for policy in scenario.trained_policies
        }
        self.sessions = SessionChecker(observer, replayable=scenario.replayable)
        oracle.record = self.episodes.record

    @property
    def training(self) -> TrainingChecker:
        """The books of the policy whose learner asks for the episodes."""
        return self.trainings[POLICY]

    @property
    def has_finished(self) -> bool:
        """True once every learner has come to its end."""
        return all(training.finished for training in self.trainings.values())

    def rewind(self, last: int) -> None:
        """The log lost what it stored after ``last``: the books begin anew with what is left. What was published stays so."""
        before, judged = self.trainings, self._observer.judged
        self._open_books()
        for policy, training in self.trainings.items():
            training.remember(before[policy])
        self.entries = [entry for entry in self.entries if entry.sequence <= last]
        self._observer.judged = frozenset()
        for entry in self.entries:
            self._enter(entry)
        self._observer.judged = judged

    def on_stored(self, entry: StreamEntry) -> None:
        """One entry of the log, at the instant at which it is stored."""
        self.entries.append(entry)
        self.on_lane(entry)
        self.stored_at = anyio.current_time()
        self._enter(entry)

    def _enter(self, entry: StreamEntry) -> None:
        at = anyio.current_time()
        if entry.payload == GARBAGE:
            self.episodes.apply_garbage(entry)
            return
        match entry.subject.split(".")[2]:
            case "task":
                record = self.episodes.apply_request(entry, at)
                if record is not None:
                    for training in self.trainings.values():
                        training.apply_request(record)
            case "obs":
                self.episodes.apply_observation(entry, at)
            case "act":
                self.episodes.apply_action(entry, at)
            case "episode":
                self.episodes.on_episode(entry, at)
            case "session":
                self.sessions.on_session(entry)
            case "floor":
                self.episodes.raise_floor(entry)
                for training in self.trainings.values():
                    training.check_floor()
                self.sessions.raise_floor(self.episodes.floor.sessions)
            case "policy":
                self.trainings[entry.subject.split(".")[3]].apply_publication(entry)
                self._oracle.newest_version = self.training.newest_version
            case "train":
                self.trainings[entry.subject.split(".")[3]].on_train(entry)

    def on_lane(self, entry: StreamEntry) -> None:
        """An entry that only the trace takes."""
        self._observer.trace("stored", entry.sequence, entry.subject, payload=entry.payload.replace(self._folder, b""))

    def check_open(self) -> None:
        """Check that no outcome is overdue."""
        at = anyio.current_time()
        for episode, record in self.episodes.open.items():
            if episode in self.training.strays or self.training.is_abandoned(record):
                continue  # nobody waits for it any more
            late = self._oracle.compute_seconds_late(record, at)
            self._observer.require(late <= 0, "an outcome by deadline and grace", f"{episode}: none yet, {late:.1f} s late")
