"""The simulation's own checks: each says what is wrong with books that are wrong, and nothing of those that are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import EPOCH_NS
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS
from fleetbus_schemas import (
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    LineageStarted,
    Message,
    Observation,
    SamplingSettings,
    SessionAnswer,
    SessionCall,
    SessionClaimed,
    SessionEnded,
    SessionRecorded,
    Subjects,
    Task,
    encode,
)
from tests.simulation.doubles.environments import EnvironmentRecord, render_observation
from tests.simulation.judge.liveness_checker import ANSWER_SECONDS, CLAIM_SECONDS, PROGRESS_SECONDS, LivenessChecker
from tests.simulation.judge.log_checker import LogChecker
from tests.simulation.judge.oracle import OUTCOME_MARGIN_SECONDS, UNANSWERED_SECONDS, FaultOracle
from tests.simulation.observer import ALL_WORKERS, Observer
from tests.simulation.platform.bus import STREAM
from tests.simulation.platform.process import RUN, Process
from tests.simulation.scenario.shape import Scenario
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects(RUN)
TASK = Task(key="t", config={"turns": 3})

anyio_backend = virtual_time


class Judge:
    """All checkers, and a log to which a test appends."""

    def __init__(self, **scenario: Any) -> None:
        self.observer = Observer()
        self.scenario = Scenario(seed=1, **scenario)
        self.oracle = FaultOracle(self.observer, self.scenario, grace_seconds=40)
        self.checker = LogChecker(self.observer, self.oracle, self.scenario, "/nowhere")
        self._sequence = 0

    @property
    def found(self) -> list[str]:
        return [violation.invariant for violation in self.observer.violations]

    def store(self, subject: str, message: Message) -> int:
        self._sequence += 1
        now_ns = EPOCH_NS + int(anyio.current_time() * 1e9)
        entry = StreamEntry(subject=subject, payload=encode(message), sequence=self._sequence, time_ns=now_ns)
        self.checker.on_stored(entry)
        return self._sequence

    def request(self, episode: str = "g000000-0", seconds: float = 600.0) -> int:
        request = EpisodeRequested(
            episode_id=episode, group_id="g000000", sample_index=0, split="train", task=TASK, policy="default",
            deadline_ns=EPOCH_NS + int((anyio.current_time() + seconds) * 1e9),
        )  # fmt: skip
        return self.store(SUBJECTS.task("default", episode), request)

    def claim(self, sequence: int, episode: str = "g000000-0") -> None:
        claim = AttemptStarted(
            episode_id=episode, attempt=1, worker="e", nonce="n", lane="e0", reason="fresh", request_sequence=sequence
        )
        self.store(SUBJECTS.episode(episode), claim)


def claimed(attempt: int = 1, worker: str = "e") -> SessionClaimed:
    return SessionClaimed(session="s", attempt=attempt, worker=worker, nonce=f"n{attempt}", task=TASK)


def recorded(number: int, call: Any, *texts: str, key: str = "", worker: str = "e", **fields: Any) -> SessionRecorded:
    """A call after the given steps, the last of which is its own."""
    key = key or f"k{number}"
    shown = render_observation("t", [each.encode() for each in texts])
    messages = (ChatMessage(role="user", content=shown),) if call in ("reset", "step") else ()
    answer = SessionAnswer(session="s", key=key, number=number, worker=worker, messages=messages, **fields)
    asked = SessionCall(session="s", call=call, key=key, text=texts[-1] if texts else "")
    return SessionRecorded(session="s", call=asked, answer=answer)


OPENED: Sequence[Message] = (claimed(), recorded(0, "open"), recorded(1, "reset"))


@pytest.mark.parametrize(
    ("entries", "invariant"),
    [
        ([*OPENED, recorded(2, "step", "a"), recorded(3, "step", "a", "b"), SessionEnded(session="s", end="closed")], ""),
        ([*OPENED, claimed(2, "f"), recorded(2, "step", "a", worker="f")], ""),
        ([recorded(0, "open")], "a session begins with a claim"),
        ([*OPENED, claimed(3)], "sessions' claims are numbered without gaps"),
        ([*OPENED, recorded(3, "step", "a")], "a session's calls are numbered without gaps"),
        ([*OPENED, recorded(2, "step", "a", key="k1")], "a call of a session is executed once"),
        ([*OPENED, claimed(2, "f"), recorded(2, "step", "a")], "only the newest claim's worker answers"),
        ([*OPENED, recorded(2, "step", "a"), recorded(3, "step", "b")], "a step of a session follows all steps before"),
        ([*OPENED, SessionEnded(session="s", end="closed"), recorded(2, "step", "a")], "nothing follows the end of a session"),
        ([*OPENED, SessionEnded(session="s", end="lost")], "every end of a session has a cause"),
        ([*OPENED, recorded(2, "step", "a", end="env_failed")], "every end of a session has a cause"),
    ],
)
async def test_books_of_a_session(entries: Sequence[Message], invariant: str) -> None:
    judge = Judge()
    for entry in entries:
        judge.store(SUBJECTS.session("s"), entry)
    assert judge.found[:1] == ([invariant] if invariant else [])


async def test_an_answer_that_was_never_recorded_is_noticed() -> None:
    judge = Judge()
    for entry in OPENED:
        judge.store(SUBJECTS.session("s"), entry)
    known = recorded(1, "reset").answer
    judge.checker.sessions.on_answer(known)
    assert judge.found == []
    judge.checker.sessions.on_answer(msgspec.structs.replace(known, reward=1.0))
    assert judge.found == ["an answer is recorded before it is given"]


async def test_an_environment_of_a_session_is_closed_once_unless_its_process_was_killed() -> None:
    judge = Judge()
    process = Process("environment", "e", 4, judge.observer)
    judge.checker.sessions.register_environment(EnvironmentRecord(process=process, episode="t", attempt=0))
    process.ending = "crashed"
    judge.checker.sessions.check_environments()
    assert judge.found == []
    process.ending = "finished"
    judge.checker.sessions.check_environments()
    assert judge.found == ["a session's environment is closed exactly once"]


async def test_what_waits_too_long_after_the_last_fault_is_named_by_its_kind() -> None:
    judge = Judge()
    liveness = LivenessChecker(judge.observer, judge.checker, judge.oracle)
    judge.oracle.processes["e"] = Process("environment", "e", 4, judge.observer)
    sequence = judge.request()
    await anyio.sleep(CLAIM_SECONDS + 1)
    liveness.check()
    assert judge.found == [], "before the world has healed anything may take long"
    judge.observer.has_healed = True
    judge.observer.disturb("pause", "e")
    await anyio.sleep(CLAIM_SECONDS - 1)
    liveness.check()
    assert judge.found == [], "counted from the end of the last fault"
    await anyio.sleep(2)
    liveness.check()
    assert judge.found == ["a request is claimed"]
    judge.claim(sequence)
    judge.store(
        SUBJECTS.observation("default", "any", "g000000-0"),
        Observation(
            episode_id="g000000-0",
            attempt=1,
            turn=0,
            policy="default",
            messages=(),
            environment_lane="e0",
            tokens_left=9,
            sampling=SamplingSettings(),
            deadline_ns=0,
        ),
    )
    await anyio.sleep(ANSWER_SECONDS + 1)
    liveness.check()
    assert judge.found[1:] == ["an observation is answered"]
    await anyio.sleep(PROGRESS_SECONDS)
    liveness.check()
    assert judge.found[-1] == "the run goes on"


@pytest.mark.parametrize(
    ("disturbances", "excused"),
    [
        ([("crash", "l", 0.0)] * 5, False),
        ([("crash", "e", 0.0)] * 2, False),
        ([("crash", "i", 0.0)] * 3, True),
        ([("pause", "e", 3 * OBSERVATION_LEASE_SECONDS)], False),
        ([("pause", "i", OBSERVATION_LEASE_SECONDS)], False),
        ([("pause", "i", 2 * OBSERVATION_LEASE_SECONDS)], True),
        ([("elect", ALL_WORKERS, 2 * OBSERVATION_LEASE_SECONDS)], True),
        ([("fill_log", ALL_WORKERS, 9 * OBSERVATION_LEASE_SECONDS)], False),
    ],
)
async def test_an_observation_is_poison_only_after_faults_that_swallow_deliveries_of_it(
    disturbances: list[tuple[str, str, float]], excused: bool
) -> None:
    judge = Judge()
    for role, name in (("environment", "e"), ("inference", "i"), ("learner", "l")):
        judge.oracle.processes[name] = Process(role, name, 4, judge.observer)
    sequence = judge.request()
    judge.claim(sequence)
    for kind, worker, seconds in disturbances:
        judge.observer.disturb(kind, worker, seconds=seconds)
    result = EpisodeFinished(
        episode_id="g000000-0", group_id="g000000", attempt=1, outcome="lost", worker="e", error_class="poison_observation",
        request_sequence=sequence, attempts=1,
    )  # fmt: skip
    judge.store(SUBJECTS.episode("g000000-0"), result)
    assert judge.found == ([] if excused else ["every failure has a cause"])


@pytest.mark.parametrize(
    ("subject", "excused"),
    [
        ("fb.sim.episode.g000000-0", True),
        (STREAM, True),
        ("fb.sim.episode.g000000-1", False),
        ("", False),
    ],
)
async def test_an_attempt_that_lost_its_episode_stops_in_time_unless_it_waits_for_an_unanswered_read(
    subject: str, excused: bool
) -> None:
    judge = Judge()
    process = judge.oracle.processes["e"] = Process("environment", "e", 4, judge.observer)
    sequence = judge.request()
    judge.claim(sequence)
    judge.oracle.register_environment(EnvironmentRecord(process=process, episode="g000000-0", attempt=1))
    judge.observer.disturb("pause", "f")
    judge.oracle.processes["f"] = Process("environment", "f", 4, judge.observer)
    second = AttemptStarted(
        episode_id="g000000-0", attempt=2, worker="f", nonce="n2", lane="e1", reason="taken_over", request_sequence=sequence
    )
    judge.store(SUBJECTS.episode("g000000-0"), second)
    if subject:
        judge.observer.lose_read("e", [subject], seconds=30.0)
    await anyio.sleep(UNANSWERED_SECONDS + 1)
    judge.oracle.check_superseded()
    assert judge.found == ([] if excused else ["a superseded attempt stops"])
    await anyio.sleep(30.0)
    judge.oracle.check_superseded()
    assert judge.found == ["a superseded attempt stops"], "counted from the end of the read"


async def test_who_takes_over_is_told_by_the_order_of_lineages_and_not_by_when_their_entries_arrive() -> None:
    """A lineage's entry on the policy's subject may come after the next one has begun, and not after that one's own."""
    judge = Judge()
    first = LineageStarted(lineage="l1", worker="a")
    second = LineageStarted(lineage="l2", worker="b", parent="l1")
    for started in (first, second):
        judge.store(SUBJECTS.train("default"), started)
    for started in (first, second):
        judge.store(SUBJECTS.policy("default"), started)
    assert judge.found == []
    judge.store(SUBJECTS.policy("default"), first)
    assert judge.found == ["no learner takes over from a later one"]


async def test_at_the_very_nanosecond_of_its_deadline_an_episode_is_over() -> None:
    """Seconds as floats are 256 ns off by then: the judge counts as the workers do."""
    judge = Judge(episode_seconds=30.0)
    await anyio.sleep(0.1234567)
    judge.request(seconds=30.0)
    record = judge.checker.episodes.record["g000000-0"]
    judge.oracle.now_ns = lambda: record.request.deadline_ns
    assert judge.oracle._is_expired(record)


async def test_an_outcome_is_overdue_after_deadline_grace_and_margin_and_by_what_clocks_were_set() -> None:
    judge = Judge()
    judge.request(seconds=100.0)
    judge.checker.training.strays.clear()
    record = judge.checker.episodes.record["g000000-0"]
    due = 100.0 + 40.0 + OUTCOME_MARGIN_SECONDS
    assert judge.oracle.compute_seconds_late(record, due - 0.001) < 0 < judge.oracle.compute_seconds_late(record, due + 0.001)
    judge.oracle.clock_slack_seconds = 14.0
    assert judge.oracle.compute_seconds_late(record, due + 13.9) < 0


@pytest.mark.parametrize(("set_after_request", "found"), [(True, []), (False, ["every failure has a cause"])])
async def test_a_clock_that_was_set_before_an_episode_was_asked_for_is_no_cause_of_its_timeout(
    set_after_request: bool, found: list[str]
) -> None:
    judge = Judge()
    judge.oracle.clock_slack_seconds = 7200.0
    if not set_after_request:
        judge.observer.disturb("set_clock")
        await anyio.sleep(60)
    judge.request(seconds=600.0)
    if set_after_request:
        judge.observer.disturb("set_clock")
    timeout = EpisodeFinished(
        episode_id="g000000-0", group_id="g000000", attempt=0, outcome="timeout", error_class="unanswered", worker="l"
    )
    judge.store(SUBJECTS.episode("g000000-0"), timeout)
    assert [each for each in judge.found if "cause" in each] == found
