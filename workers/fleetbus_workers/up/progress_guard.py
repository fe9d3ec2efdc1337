"""Lines of `up` about failures during a run, and the end of a run that cannot progress. Pure: time is an argument.

Every kind of failure and every problem of a worker is said once, with count and cause; nothing of runs before this one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from fleetbus.config.settings import LimitSettings
from fleetbus.core.episode.failure_kinds import EXPECTED, FailureKinds, is_unplayed
from fleetbus.errors import FleetbusError
from fleetbus_schemas import (
    GRADED,
    EpisodeFinished,
    EvaluationFinished,
    Heartbeat,
    Message,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
    WorkerFailed,
    WorkerRole,
    WorkerStarted,
    WorkerStopped,
)
from fleetbus_workers.environment.episode.conclusion import FEW_TURNS, NO_CALL_READ
from fleetbus_workers.observe.run.recent_workers import RecentWorkers
from fleetbus_workers.up.restarts import is_successor

GATHER_SECONDS = 1.0
"""Between the first failure of a kind and its line: the count says whether it is one episode or all of them."""

SILENT_SECONDS = 8.0
"""Without a heartbeat for this long (four are due) a worker's silence is said."""

TRACEBACK_LINES = 24
PROBLEM_CHARACTERS = 500
MOST_PROBLEMS = 256
"""Problems of the workers of one role that are said, and as many silences: heartbeats name what they like."""

MOST_CAUSES = 16
MANY_SHORT = 8
"""Graded episodes whose tokens were used up in their first turns, or without a call, and most of all: no accident any more."""


class RunStalled(FleetbusError):
    """The run cannot progress as it is configured; the message is the cause."""


class _HeardWorker(msgspec.Struct, kw_only=True):
    heard_at: float
    actions: float = 0.0
    problem: str = ""
    is_silence_said: bool = False
    has_ended: bool = False
    """It said so; it is kept for as long as a heartbeat from before may be read."""


class ProgressGuard:
    """One run of so many ``learners``, from the moment when `up` began to watch it."""

    def __init__(self, limits: LimitSettings, now: float, *, learners: int = 1) -> None:
        self._unfinished = learners
        self._ungraded_limit = limits.ungraded_episodes
        self._no_progress_seconds = limits.no_progress
        self._hung_seconds = limits.silent_worker
        self._heard_since = self._heard_at = now
        """Since when, without a gap, and when last any worker was heard."""
        self._failures = FailureKinds()
        self._said: dict[int, int] = {}
        """How many there were of a kind when it was said last, by its index."""
        self._first_seen: dict[int, float] = {}
        self._problems: list[str] = []
        self._paused: set[str] = set()
        """Learners that were asked to request nothing, whether they live or not."""
        self._said_problems: defaultdict[WorkerRole, set[str]] = defaultdict(set)
        self._silences: Counter[WorkerRole] = Counter()
        self._workers: RecentWorkers[_HeardWorker] = RecentWorkers()
        self._ungraded = 0
        self._has_graded = False
        self._progressed_at = now
        self._begun: set[str] = set()
        self._graded = self._short = self._unread = 0
        self._is_shortage_said = self._is_unread_said = False

    def apply(self, message: Message, now: float) -> None:
        """Take in an entry of the log that was stored after `up` began."""
        self._failures.apply(message)
        match message:
            case EpisodeFinished():
                self._apply_result(message, now)
            case StepTrained() | EvaluationFinished():
                self._progressed_at = now
                self._begun.clear()
            case PolicyPublished():
                self._note_beginning("version", now)
            case WorkerStarted():
                self._note_beginning(message.role, now)
                if (seen := self._workers.get(message.role, message.worker)) is not None and seen.has_ended:
                    self._workers.remove(message.role, message.worker)
            case WorkerStopped() | WorkerFailed():
                self._workers.put(message.role, message.worker, _HeardWorker(heard_at=now, has_ended=True))
            case TrainingFinished(more=False):
                self._unfinished -= 1
                self._progressed_at = now

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat: actions that were sampled are progress, a learner that trains, and one that is paused.

        Each role says its own: a gateway samples no actions and pauses nothing.
        """
        if now - self._heard_at > SILENT_SECONDS:
            self._heard_since = now
        self._heard_at = now
        seen = self._workers.get(beat.role, beat.worker) or _HeardWorker(heard_at=now)
        if seen.has_ended:
            return
        self._workers.put(beat.role, beat.worker, seen)
        seen.heard_at, seen.problem, seen.is_silence_said = now, beat.problem[:PROBLEM_CHARACTERS], False
        actions = beat.counters.get("actions", 0.0) if beat.role == "inference" else 0.0
        is_paused = beat.paused and beat.role == "learner"
        if (actions and actions != seen.actions) or is_paused or _is_training(beat):
            self._progressed_at = now
        if beat.role == "learner" and (is_paused or not beat.problem):  # who says that it is blocked knows nothing else
            self._note_pause(beat.worker, is_paused)
        seen.actions = actions  # whatever was said once, such as infinity, later ones count
        if seen.problem:
            self._add_problem(beat.role, f"{beat.worker}: {seen.problem}")

    def _note_pause(self, learner: str, is_paused: bool) -> None:
        if is_paused and learner not in self._paused and len(self._paused) < MOST_PROBLEMS:
            self._paused.add(learner)
            self._problems.append("admission is paused by request")
        for before in [] if is_paused else [each for each in self._paused if is_successor(learner, each)]:
            self._paused.remove(before)
            again = "" if before == learner else ": a learner that begins anew is not paused"
            self._problems.append(f"admission is resumed{again}")

    def take_lines(self, now: float) -> list[str]:
        """Take the lines that are to be printed now and have not been."""
        for role, name, worker in self._workers.list_all():
            if now - worker.heard_at <= SILENT_SECONDS or worker.is_silence_said:
                continue
            if worker.has_ended:
                self._workers.remove(role, name)
            else:
                worker.is_silence_said = True
                self._silences[role] += 1
                if self._silences[role] <= MOST_PROBLEMS:
                    self._problems.append(f"{name}: no heartbeat for {SILENT_SECONDS:g} s: it is blocked, suspended or dead")
        lines, self._problems = self._problems, []
        for index, kind in enumerate(self._failures.kinds):
            first = self._first_seen.setdefault(index, now)
            if index not in self._said and now - first >= GATHER_SECONDS:
                self._said[index] = kind.count
                lines += [kind.line, *format_traceback_lines(kind.traceback)]
        return lines

    def take_hung(self, now: float) -> list[tuple[WorkerRole, str]]:
        """Take the workers, by role and name, that have been silent for too long while others were heard: if nobody is, the
        server or the way to it is what is silent, and all have the same time again once it is back (docs/decisions/0264)."""
        if not self._hung_seconds or now - self._heard_at > SILENT_SECONDS:
            return []
        silent = [
            (role, name)
            for role, name, worker in self._workers.list_all()
            if not worker.has_ended and now - max(worker.heard_at, self._heard_since) >= self._hung_seconds
        ]
        for role, name in silent:
            self._workers.remove(role, name)
        return silent

    def take_final_lines(self) -> list[str]:
        """The kinds of failure that have not been said, or whose count has grown since."""
        lines = []
        for index, kind in enumerate(self._failures.kinds):
            if index not in self._said:
                lines += [kind.line, *format_traceback_lines(kind.traceback)]
            elif kind.count > self._said[index]:
                lines.append(f"in all, {kind.line}")
            self._said[index] = kind.count
        return lines

    def find_stall(self, now: float) -> RunStalled | None:
        """Find the reason to end the run: too many episodes in a row without a grade, or no progress for too long."""
        if self._unfinished <= 0:
            return None
        seconds, limit = now - self._progressed_at, self._no_progress_seconds
        is_late = bool(limit) and seconds >= limit
        if self._ungraded_limit and self._ungraded >= self._ungraded_limit and (not self._has_graded or is_late):
            return RunStalled(
                f"{self._ungraded} episodes in a row ended without a grade (limits.ungraded_episodes), "
                f"the last one {self._describe_cause()}"
            )
        if is_late:
            return RunStalled(f"nothing progressed for {seconds:.0f} s (limits.no_progress): {self._describe_cause()}")
        return None

    def _note_beginning(self, what: str, now: float) -> None:
        """A role that starts, or a version, is progress once until a step is trained: what starts again and again is none."""
        if what not in self._begun:
            self._begun.add(what)
            self._progressed_at = now

    def _apply_result(self, message: EpisodeFinished, now: float) -> None:
        if is_unplayed(message):
            self._ungraded += 1
        elif message.outcome in GRADED:
            self._ungraded, self._has_graded, self._progressed_at = 0, True, now
            self._note_used_tokens(message)
            self._note_unread(message)
        elif message.outcome not in EXPECTED:
            self._ungraded += 1

    def _note_used_tokens(self, message: EpisodeFinished) -> None:
        """Say once that most episodes end in their first turns for want of tokens: nothing is learned from those."""
        self._graded += 1
        is_short = message.error_class == "tokens" or (message.error_class == "seat_tokens" and message.turns <= FEW_TURNS)
        has_said_so = bool(message.note) and not message.note.startswith(NO_CALL_READ)
        self._short += message.outcome == "truncated" and is_short and has_said_so
        if self._short >= MANY_SHORT and 2 * self._short > self._graded and not self._is_shortage_said:
            self._is_shortage_said = True
            limit = "episode.max_episode_tokens" if message.error_class == "tokens" else "the seat's max_tokens"
            advice = f"raise {limit}, and inference.max_model_len as far as the model goes"
            last = shorten_note(message.note)
            self._problems.append(f"{self._short} of {self._graded} episodes had no room, the last one: {last}; {advice}")

    def _note_unread(self, message: EpisodeFinished) -> None:
        """Say once that in most episodes nothing that the policy writes is a call: nothing is learned from those."""
        self._unread += message.note.startswith(NO_CALL_READ)
        if self._unread >= MANY_SHORT and 2 * self._unread > self._graded and not self._is_unread_said:
            self._is_unread_said = True
            last = shorten_note(message.note)
            self._problems.append(f"{self._unread} of {self._graded} episodes called no tool, the last one: {last}")

    def _add_problem(self, role: WorkerRole, line: str) -> None:
        said = self._said_problems[role]
        if line not in said and len(said) < MOST_PROBLEMS:
            said.add(line)
            self._problems.append(line)

    def _describe_cause(self) -> str:
        workers = sorted(self._workers.list_all(), key=lambda each: each[:2])
        problems = [f"{name}: {worker.problem}" for _, name, worker in workers if worker.problem]
        silent = [f"{name} is silent" for _, name, worker in workers if worker.is_silence_said]
        failures = [kind.reason for kind in self._failures.kinds[-1:]]
        causes = [*failures, *problems, *silent] if self._ungraded else [*problems, *silent, *failures]
        return (
            "; ".join(causes[:MOST_CAUSES]) or "no episode ended and no action was sampled; `fleetbus top` says where it waits"
        )


def _is_training(beat: Heartbeat) -> bool:
    """A learner that trains, publishes or stores a checkpoint, by its own word: others may invent workers that play. One that
    names a problem waits instead."""
    at_work = beat.counters.get("begun_work", 0.0) - beat.counters.get("ended_work", 0.0)
    return beat.role == "learner" and at_work > 0 and not beat.problem


def shorten_note(note: str) -> str:
    """A note as one line of the screen: a worker may have written anything into it."""
    return " ".join(note[:PROBLEM_CHARACTERS].split())


def format_traceback_lines(text: str) -> Iterable[str]:
    """A traceback as lines of the screen, the middle left out if it is long."""
    lines = text.splitlines()
    if len(lines) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        lines = [*lines[:half], f"[{len(lines) - 2 * half} lines left out]", *lines[-half:]]
    return [f"  | {line}" for line in lines]
