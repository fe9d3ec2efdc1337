"""A run as the watchdog sees it, told in messages whose times are seconds from its start."""

from __future__ import annotations

from typing import Any

from fleetbus.bus.base import StreamEntry
from fleetbus_schemas import (
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Heartbeat,
    LineageStarted,
    Message,
    StepTrained,
    Subjects,
    Task,
    encode,
)
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.watchdog import Stall, find_stalls

SUBJECTS = Subjects("r")
SECOND = 1_000_000_000
START = 1_000.0


class ScriptedRun:
    """A run whose clock goes in seconds from the start; every worker that was heard is heard again whenever one looks."""

    def __init__(self) -> None:
        self.state = RunState(steps=10)
        self.health = LogHealth()
        self.health.record_usage(10, 1_000, 1, START)
        self.beats: list[Heartbeat] = []
        self._sequence = 0

    def add(self, at: float, subject: str, message: Message) -> None:
        self._sequence += 1
        now_ns = int((START + at) * SECOND)
        entry = StreamEntry(subject=subject, payload=encode(message), sequence=self._sequence, time_ns=now_ns)
        self.state.apply(entry, message, START + at, now_ns)

    def begin(self, at: float = 0.0) -> None:
        self.add(at, SUBJECTS.train("default"), LineageStarted(lineage="a", worker="lea"))

    def request(self, at: float, *episodes: str, group: str = "g1") -> None:
        self.request_in("default", at, *episodes, group=group)

    def request_in(self, pool: str, at: float, *episodes: str, group: str = "g1") -> None:
        for index, episode in enumerate(episodes):
            request = EpisodeRequested(
                episode_id=episode, group_id=group, sample_index=index, split="train", task=Task(key="t"), policy="default",
                deadline_ns=0,
            )  # fmt: skip
            self.add(at, SUBJECTS.task(pool, episode), request)

    def claim(self, at: float, *episodes: str) -> None:
        for episode in episodes:
            claim = AttemptStarted(episode_id=episode, attempt=1, worker="env", nonce="n", lane="e0")
            self.add(at, SUBJECTS.episode(episode), claim)

    def finish(self, at: float, *episodes: str, outcome: str = "completed", group: str = "g1") -> None:
        for episode in episodes:
            result = EpisodeFinished(
                episode_id=episode, group_id=group, attempt=1, outcome=outcome, worker="env",  # type: ignore[arg-type]
                reward=1.0 if outcome == "completed" else None,
                error_class="" if outcome == "completed" else "ConnectionError",
            )  # fmt: skip
            self.add(at, SUBJECTS.episode(episode), result)

    def train(self, at: float, step: int) -> None:
        self.add(at, SUBJECTS.train("default"), StepTrained(lineage="a", step=step, version=step, episodes=("e",)))

    def alive(self, role: str, *, slots: int = 8, in_flight: int = 0, version: int = 0, **fields: Any) -> None:
        name = {"environment": "env", "inference": "inf", "learner": "lea"}[role]
        self.beats = [beat for beat in self.beats if beat.role != role]
        self.beats.append(
            Heartbeat(role=role, worker=name, slots=slots, in_flight=in_flight, policy_version=version, **fields)  # type: ignore[arg-type]
        )

    def fleet(self, **environment: Any) -> None:
        self.alive("environment", **environment)
        self.alive("inference")
        self.alive("learner", slots=2, in_flight=2)

    def stalls(self, at: float) -> list[Stall]:
        for beat in self.beats:
            self.state.worker_registry.record_heartbeat(beat, START + at)
        return find_stalls(self.state, self.health, now=START + at, now_ns=int((START + at) * SECOND))

    def only(self, at: float) -> Stall:
        (stall,) = self.stalls(at)
        assert stall.line.startswith(f"stuck at the {stall.where} for {stall.seconds:.0f} s: ")
        return stall
