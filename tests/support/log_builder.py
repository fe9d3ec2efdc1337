"""The log of a run written by hand, entry by entry, and its audit."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbus.audit.run import audit_run, enter
from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.audit.books import Audit
from fleetbus.core.audit.findings import Report
from fleetbus_schemas import (
    Action,
    ActionReference,
    AttemptReleased,
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    Exclusion,
    LineageStarted,
    Message,
    Observation,
    PolicyPublished,
    SeatLimit,
    SeatPolicy,
    Split,
    StepTrained,
    Subjects,
    Task,
    TrainingFinished,
    VersionSpan,
    encode,
)
from fleetbus_schemas.tokens import EMPTY_HISTORY, extend_history, pack_ids, pack_logprobs, pack_mask

SUBJECTS = Subjects("run")
PROMPT, SAMPLED = 3, 2


class LogBuilder:
    """A log in the making; every method appends one entry and returns its sequence."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, bytes]] = []
        self.history = b""

    def add(self, subject: str, message: Message) -> int:
        self.entries.append((subject, encode(message)))
        return len(self.entries)

    def lineage(
        self, name: str = "l1", parent: str = "", parent_step: int = 0, restart: str = "", settings: Any = None, *,
        policy: str = "default",
    ) -> int:  # fmt: skip
        started = LineageStarted(
            lineage=name, worker="learner", parent=parent, parent_step=parent_step, restart=restart, settings=settings or {}
        )
        self.add(SUBJECTS.train(policy), started)
        return self.add(SUBJECTS.policy(policy), started)

    def version(self, number: int = 0, *, uri: str = "", policy: str = "default") -> int:
        published = PolicyPublished(
            policy=policy, version=number, lineage="l1", step=number, uri=uri, manifest=(), size_bytes=0
        )
        return self.add(SUBJECTS.policy(policy), published)

    def request(
        self, episode: str, *, split: Split = "train", pool: str = "default", seats: tuple[SeatPolicy, ...] = (),
        seat_limits: tuple[SeatLimit, ...] = (),
    ) -> int:  # fmt: skip
        request = EpisodeRequested(
            episode_id=episode, group_id="g", sample_index=0, split=split, task=Task(key="t"), policy="default", deadline_ns=1,
            lineage="l1" if split == "train" else "", group_size=1, seats=seats, seat_limits=seat_limits,
        )  # fmt: skip
        return self.add(SUBJECTS.task(pool, episode), request)

    def claim(self, episode: str, attempt: int = 1, *, resumed: int = 0, seal: bytes = b"") -> int:
        claim = AttemptStarted(
            episode_id=episode, attempt=attempt, worker="w", nonce=f"{episode}{attempt}", lane="e0", resumed_at_turn=resumed,
            seal=seal,
        )  # fmt: skip
        return self.add(SUBJECTS.episode(episode), claim)

    def release(self, episode: str, attempt: int = 1) -> int:
        return self.add(SUBJECTS.episode(episode), AttemptReleased(episode_id=episode, attempt=attempt, worker="w"))

    def observe(self, episode: str, turn: int, attempt: int = 1, **changes: Any) -> int:
        observation = Observation(
            episode_id=episode, attempt=attempt, turn=turn, policy="default", messages=(), tokens_left=9,
            environment_lane="e0", deadline_ns=1, history_hash=compute_history_hash(turn),
        )  # fmt: skip
        observation = msgspec.structs.replace(observation, **changes)
        return self.add(SUBJECTS.observation(observation.policy, "any", episode), observation)

    def act(self, episode: str, turn: int, attempt: int = 1, *, version: int = 0, **changes: Any) -> int:
        delta, sampled = pack_ids(range(PROMPT)), pack_ids(range(SAMPLED))
        action = Action(
            episode_id=episode, attempt=attempt, turn=turn, text="x", prompt_delta=delta, sampled=sampled,
            logprobs=pack_logprobs([-1.0] * SAMPLED), versions=(VersionSpan(version=version, start=0, stop=SAMPLED),),
            history_hash=compute_history_hash(turn + 1),
        )  # fmt: skip
        return self.add(SUBJECTS.action("e0", episode), msgspec.structs.replace(action, **changes))

    def finish(self, episode: str, actions: list[int], attempt: int = 1, **changes: Any) -> int:
        mask = ([False] * PROMPT + [True] * SAMPLED) * len(actions)
        result = EpisodeFinished(
            episode_id=episode, group_id="g", attempt=attempt, outcome="completed", worker="w", reward=1.0, turns=len(actions),
            actions=tuple(ActionReference(sequence=sequence, lane="e0", turn=turn) for turn, sequence in enumerate(actions)),
            tokens=len(mask), loss_mask=pack_mask(mask),
        )  # fmt: skip
        return self.add(SUBJECTS.episode(episode), msgspec.structs.replace(result, **changes))

    def play(self, episode: str, turns: int = 2, *, request: bool = True, split: Split = "train", **changes: Any) -> int:
        """A whole episode."""
        if request:
            self.request(episode, split=split)
        self.claim(episode)
        actions = []
        for turn in range(turns):
            self.observe(episode, turn)
            actions.append(self.act(episode, turn))
        return self.finish(episode, actions, split=split, **changes)

    def step(
        self, number: int, episodes: list[str], excluded: dict[str, str] | None = None, lineage: str = "l1", *,
        policy: str = "default", **changes: Any,
    ) -> int:  # fmt: skip
        reasons = tuple(Exclusion(episode_id=episode, reason=reason) for episode, reason in (excluded or {}).items())
        trained = StepTrained(lineage=lineage, step=number, version=number, episodes=tuple(episodes), excluded=reasons)
        return self.add(SUBJECTS.train(policy), msgspec.structs.replace(trained, **changes))

    def checkpoint(self, step: int, *, floor: int = 1, lineage: str = "l1", file: str = "") -> int:
        stored = CheckpointStored(lineage=lineage, step=step, version=step, file=file, floor=floor)
        return self.add(SUBJECTS.train("default"), stored)

    def end(self, step: int, excluded: dict[str, str], lineage: str = "l1") -> int:
        reasons = tuple(Exclusion(episode_id=episode, reason=reason) for episode, reason in excluded.items())
        finished = TrainingFinished(lineage=lineage, step=step, version=step, excluded=reasons)
        return self.add(SUBJECTS.train("default"), finished)


def read_entries(log: LogBuilder) -> list[StreamEntry]:
    """Its entries as a server gives them."""
    return [
        StreamEntry(sequence=number, subject=subject, payload=payload, time_ns=number)
        for number, (subject, payload) in enumerate(log.entries, 1)
    ]


def compute_history_hash(turns: int) -> bytes:
    """The hash of a history of so many turns: all have the same tokens."""
    digest = EMPTY_HISTORY
    for _ in range(turns):
        digest = extend_history(digest, pack_ids(range(PROMPT)), pack_ids(range(SAMPLED)))
    return digest


def start_log() -> LogBuilder:
    log_builder = LogBuilder()
    log_builder.lineage()
    log_builder.version()
    return log_builder


async def audit_log(log_builder: LogBuilder) -> Report:
    """The audit of the story as the log of a bus."""
    async with MemoryServer().connect("run") as bus:
        await bus.declare(plan_run("run", lanes=1))
        for subject, payload in log_builder.entries:
            await bus.publish(subject, payload)
        return await audit_run(bus, SUBJECTS)


def fold_audit(log_builder: LogBuilder) -> Audit:
    audit = Audit()
    for sequence, (subject, payload) in enumerate(log_builder.entries, start=1):
        enter(audit, StreamEntry(subject=subject, payload=payload, sequence=sequence, time_ns=0))
    return audit


def kinds(report: Report) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.ids for finding in report.findings}
