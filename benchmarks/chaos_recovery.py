"""Reads the time to recover from each fault out of a fleet's log: differences of the server's timestamps. Pure.

An environment worker's episodes have recovered at their next claim or result, an inference worker's turns at their Action, a
learner at the next step, a server's clients at whatever each of them stored next, or said when it had nothing to do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.chaos_processes import InjectedFault
from fleetbus.bus.streams import TASK_LEASE_SECONDS
from fleetbus_schemas import (
    ANY_LANE,
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Heartbeat,
    LineageStarted,
    Message,
    Observation,
    PolicyPublished,
    StepTrained,
    WorkerStarted,
)

LIMITS_SECONDS = {"environment": TASK_LEASE_SECONDS + 2, "inference": 5.0, "learner": 15.0}
"""What recovery may take."""

EpisodeEntry = AttemptStarted | AttemptReleased | EpisodeFinished
Turn = tuple[str, int, int]
"""Episode, attempt, turn."""


class Entry(msgspec.Struct, frozen=True):
    """A decoded entry of the log."""

    time_ns: int
    subject: str
    message: Message


class Heard(msgspec.Struct, frozen=True):
    """A heartbeat, and when it was received."""

    time_ns: int
    heartbeat: Heartbeat


class Recovery:
    """The log of a run, indexed once."""

    def __init__(self, log: Sequence[Entry], injected: Sequence[InjectedFault], heard: Sequence[Heard] = ()) -> None:
        self._struck = injected
        self._episodes: defaultdict[str, list[tuple[int, EpisodeEntry]]] = defaultdict(list)
        self._asked: defaultdict[Turn, list[tuple[int, str]]] = defaultdict(list)
        self._answered: dict[Turn, int] = {}
        self._steps: list[tuple[int, str]] = []
        self._signs: defaultdict[str, list[int]] = defaultdict(list)
        self._lane: dict[str, str] = {}
        self._ready: dict[str, int] = {}
        author = _AuthorIndex()
        for entry in log:
            self._index_entry(entry)
            if worker := author.of(entry.message):
                self._signs[worker].append(entry.time_ns)
        for each in heard:
            if each.heartbeat.role == "learner" or not each.heartbeat.in_flight:
                self._signs[each.heartbeat.worker].append(each.time_ns)

    def _index_entry(self, entry: Entry) -> None:
        time_ns, message = entry.time_ns, entry.message
        match message:
            case AttemptStarted() | AttemptReleased() | EpisodeFinished():
                self._episodes[message.episode_id].append((time_ns, message))
            case Observation():
                turn = (message.episode_id, message.attempt, message.turn)
                self._asked[turn].append((time_ns, entry.subject.split(".")[4]))
            case Action():
                self._answered.setdefault((message.episode_id, message.attempt, message.turn), time_ns)
            case StepTrained():
                self._steps.append((time_ns, message.lineage))
            case WorkerStarted():
                self._lane[message.worker] = message.lane
                self._ready[message.worker] = time_ns

    def environment(self, *, undisturbed: bool = False) -> list[float]:
        """Seconds per episode that a killed environment worker held."""
        seconds: list[float] = []
        for kill in self._select_kills("environment", undisturbed):
            for entries in self._episodes.values():
                seconds += self._episode_moved(entries, kill)
        return seconds

    def _episode_moved(self, entries: Sequence[tuple[int, EpisodeEntry]], kill: InjectedFault) -> list[float]:
        for (_, claim), following in zip(entries, [*entries[1:], None], strict=True):
            if isinstance(claim, AttemptStarted) and claim.worker == kill.name:
                if following is None:
                    return [math.inf]
                if following[0] > kill.time_ns:
                    return [(following[0] - kill.time_ns) / 1e9]
        return []

    def inference(self, *, undisturbed: bool = False) -> list[float]:
        """Seconds per turn that a killed inference worker held, or that waited on its lane. Turns whose attempt was
        superseded meanwhile had no Action to get, and are left out."""
        seconds: list[float] = []
        for kill in self._select_kills("inference", undisturbed):
            for turn, asked in self._asked.items():
                answered = self._answered.get(turn, math.inf)
                if asked[0][0] < kill.time_ns < answered and self._was_held_by(kill, turn, asked):
                    if answered < math.inf or not self._superseded(turn, kill.time_ns):
                        seconds.append((answered - kill.time_ns) / 1e9)
        return seconds

    def _was_held_by(self, kill: InjectedFault, turn: Turn, asked: Sequence[tuple[int, str]]) -> bool:
        lane = [lane for time_ns, lane in asked if time_ns < kill.time_ns][-1]
        waiting = lane != ANY_LANE and lane == self._lane.get(kill.name)
        return waiting or ".".join(map(str, turn)) in kill.held

    def _superseded(self, turn: Turn, after_ns: int) -> bool:
        return any(
            time_ns > after_ns or (isinstance(entry, AttemptStarted) and entry.attempt > turn[1])
            for time_ns, entry in self._episodes[turn[0]]
        )

    def learner(self, *, undisturbed: bool = False) -> list[float]:
        """Seconds from each kill of the learner to the next step of another one."""
        seconds = []
        for kill in self._select_kills("learner", undisturbed):
            before = {lineage for time_ns, lineage in self._steps if time_ns <= kill.time_ns}
            later = [time_ns for time_ns, lineage in self._steps if time_ns > kill.time_ns and lineage not in before]
            seconds.append((min(later, default=math.inf) - kill.time_ns) / 1e9)
        return seconds

    def server(self) -> list[float]:
        """Seconds per worker from the server's return to its next sign of life, unless another fault came between."""
        seconds = []
        for fault in self._struck:
            for worker in fault.alive if fault.role == "server" else ():
                sign = min((time_ns for time_ns in self._signs[worker] if time_ns >= fault.back_ns), default=math.inf)
                injected = [other.time_ns for other in self._struck if other.name == worker and other.time_ns >= fault.time_ns]
                if min(self._signs[worker], default=math.inf) < fault.time_ns and sign < min(injected, default=math.inf):
                    seconds.append((sign - fault.back_ns) / 1e9)
        return seconds

    def _select_kills(self, role: str, undisturbed: bool) -> list[InjectedFault]:
        """The kills in a role; only those during whose recovery all others of the role and the server were there, if so asked:
        nobody can take over while all are dead, and a stopped process swallows what it is given next."""
        kills = [fault for fault in self._struck if (fault.role, fault.kind) == (role, "kill")]
        return [kill for kill in kills if not undisturbed or self._is_undisturbed(kill)]

    def _is_undisturbed(self, kill: InjectedFault) -> bool:
        until_ns = kill.time_ns + int(LIMITS_SECONDS[kill.role] * 1e9)
        return not any(
            fault.time_ns < until_ns and self._find_recovered_ns(fault) > kill.time_ns
            for fault in self._struck
            if fault.role in (kill.role, "server") and fault is not kill
        )

    def _find_recovered_ns(self, fault: InjectedFault) -> float:
        """When the struck process went on, or another in its place was ready."""
        if fault.back_ns:
            return fault.back_ns
        place = fault.name.rpartition("-")[0]
        ready = [time_ns for name, time_ns in self._ready.items() if name.rpartition("-")[0] == place]
        return min((time_ns for time_ns in ready if time_ns > fault.time_ns), default=math.inf)


class _AuthorIndex:
    """Who stored an entry; claims and lineages tell it for those that do not name their worker."""

    def __init__(self) -> None:
        self._of_attempt: dict[tuple[str, int], str] = {}
        self._of_lineage: dict[str, str] = {}

    def of(self, message: Message) -> str:
        match message:
            case AttemptStarted():
                self._of_attempt[message.episode_id, message.attempt] = message.worker
                return message.worker
            case LineageStarted():
                self._of_lineage[message.lineage] = message.worker
                return message.worker
            case Observation():
                return self._of_attempt.get((message.episode_id, message.attempt), "")
            case EpisodeFinished() | Action() | WorkerStarted():
                return message.worker
            case EpisodeRequested() | PolicyPublished() | StepTrained():
                return self._of_lineage.get(message.lineage, "")
        return ""


def compute_percentiles(seconds: Iterable[float]) -> dict[str, float | int | None]:
    """Count, median, 99th percentile and maximum (nearest rank); ``never`` counts what did not recover."""
    ordered = sorted(seconds)

    def rank(share: float) -> float | None:
        value = ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf
        return round(value, 3) if math.isfinite(value) else None

    never = sum(not math.isfinite(value) for value in ordered)
    return {"count": len(ordered), "never": never, "p50": rank(0.5), "p99": rank(0.99), "max": rank(1.0)}


def build_recovery(recovery: Recovery) -> dict[str, dict[str, float | int | None]]:
    """``undisturbed``: after kills during whose recovery no other member of the role, nor the server, was struck or away."""
    return {
        "environment": compute_percentiles(recovery.environment()),
        "environment_undisturbed": compute_percentiles(recovery.environment(undisturbed=True)),
        "inference": compute_percentiles(recovery.inference()),
        "inference_undisturbed": compute_percentiles(recovery.inference(undisturbed=True)),
        "learner": compute_percentiles(recovery.learner()),
        "learner_undisturbed": compute_percentiles(recovery.learner(undisturbed=True)),
        "server": compute_percentiles(recovery.server()),
    }
