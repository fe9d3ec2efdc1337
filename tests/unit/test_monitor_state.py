"""The monitor's state is a fold: who is there, how episodes and groups stand, where an episode's time went."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.delivery.heartbeats import SILENT_AFTER_SECONDS
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.trained_tokens import TrainedTokensIndex
from fleetbus_schemas import (
    NEW_ROOT,
    Action,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSegment,
    Heartbeat,
    LineageStarted,
    Message,
    Observation,
    SegmentOrigin,
    StepTrained,
    Subjects,
    Task,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
    encode,
)
from fleetbus_schemas.tokens import pack_ids, pack_logprobs
from fleetbus_workers.observe.bundle.copied_run import RunCopier
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.numbers import build_numbers
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.monitor.timeline import timeline
from fleetbus_workers.observe.monitor.token_decoder import load_token_decoder
from fleetbus_workers.observe.run.state import KEPT_EPISODES, MOST_ERROR_CLASSES, RunState
from fleetbus_workers.observe.run.worker_registry import RETENTION_SECONDS, WorkerRegistry

SUBJECTS = Subjects("r")
SECOND = 1_000_000_000


class Log:
    """Entries with times, and a fold of them."""

    def __init__(self) -> None:
        self.state = RunState(steps=10)
        self.entries: list[StreamEntry] = []

    def add(self, subject: str, message: Message, seconds: float = 0.0) -> None:
        entry = StreamEntry(
            subject=subject, payload=encode(message), sequence=len(self.entries) + 1, time_ns=int(seconds * SECOND) + SECOND
        )
        self.entries.append(entry)
        self.state.apply(entry, message, now=seconds, now_ns=entry.time_ns)

    def request(self, episode: str, group: str = "g", seconds: float = 0.0) -> None:
        request = EpisodeRequested(
            episode_id=episode, group_id=group, sample_index=0, split="train", task=Task(key=f"t-{group}"), policy="default",
            deadline_ns=0,
        )  # fmt: skip
        self.add(SUBJECTS.task("default", episode), request, seconds)

    def claim(self, episode: str, attempt: int = 1, seconds: float = 0.0, worker: str = "e") -> None:
        reason: Literal["fresh", "taken_over"] = "fresh" if attempt == 1 else "taken_over"
        claim = AttemptStarted(episode_id=episode, attempt=attempt, worker=worker, nonce="n", lane="e0", reason=reason)
        self.add(SUBJECTS.episode(episode), claim, seconds)

    def finish(self, episode: str, reward: float | None, outcome: str = "completed", seconds: float = 0.0, **more: Any) -> None:
        more.setdefault("error_class", "" if reward is not None else "boom")
        finished = EpisodeFinished(
            episode_id=episode, group_id="g", attempt=1, outcome=outcome, worker="e", reward=reward, task_key="t-g",  # type: ignore[arg-type]
            timings={"verify": 0.5, "close": 0.25}, **more,
        )  # fmt: skip
        self.add(SUBJECTS.episode(episode), finished, seconds)

    def step(self, step: int, lineage: str = "a", *episodes: str) -> None:
        trained = StepTrained(lineage=lineage, step=step, version=step, episodes=episodes, metrics={"reward": float(step)})
        self.add(SUBJECTS.train("default"), trained, float(step))


def beat(worker: str = "w", **fields: object) -> Heartbeat:
    return Heartbeat(role="environment", worker=worker, slots=8, in_flight=3, **fields)  # type: ignore[arg-type]


def test_a_worker_that_stops_beating_is_silent_in_less_than_five_seconds_and_stays_in_the_table() -> None:
    worker_registry = WorkerRegistry()
    worker_registry.record_heartbeat(beat(), now=100.0)
    assert SILENT_AFTER_SECONDS + 0.5 < 5.0  # half a second is how often the page is told
    assert [row.state for row in worker_registry.rows(100.0 + SILENT_AFTER_SECONDS)] == ["working"]
    assert [row.state for row in worker_registry.rows(100.1 + SILENT_AFTER_SECONDS)] == ["silent"]
    assert [row.state for row in worker_registry.rows(400.0)] == ["silent"]
    worker_registry.record_heartbeat(beat(), now=401.0)
    assert [row.state for row in worker_registry.rows(401.0)] == ["working"]


def test_workers_say_goodbye_or_why_they_failed() -> None:
    worker_registry = WorkerRegistry()
    for worker in ("stops", "fails", "starts"):
        worker_registry.record_life_event(WorkerStarted(role="inference", worker=worker), age_seconds=0, now=10.0)
    worker_registry.record_life_event(WorkerStopped(role="inference", worker="stops"), age_seconds=0, now=11.0)
    worker_registry.record_life_event(
        WorkerFailed(role="inference", worker="fails", error_class="E", error="why"), age_seconds=0, now=11.0
    )
    states = {row.worker: (row.state, row.note) for row in worker_registry.rows(12.0)}
    assert states == {"stops": ("stopped", ""), "fails": ("failed", "E: why"), "starts": ("starting", "")}


def test_of_two_records_of_a_worker_the_newer_is_shown() -> None:
    """One comes from the log's newest entries, the other from all of them."""
    whole, recent = WorkerRegistry(), WorkerRegistry()
    for worker in ("stops", "starts again"):
        recent.record_heartbeat(beat(worker), now=10.0 if worker == "stops" else 12.0)
        whole.record_life_event(WorkerStopped(role="environment", worker=worker), age_seconds=0, now=11.0)
    whole.record_life_event(WorkerStarted(role="environment", worker="starts"), age_seconds=0, now=11.0)
    recent.record_heartbeat(beat("starts"), now=10.9)
    whole.take_over(recent)
    rows = {row.worker: row.state for row in whole.rows(12.0)}
    assert rows == {"stops": "stopped", "starts again": "working", "starts": "working"}


def test_workers_of_long_ago_are_not_shown() -> None:
    worker_registry = WorkerRegistry()
    worker_registry.record_life_event(WorkerStarted(role="inference", worker="old"), age_seconds=86_400, now=10.0)
    assert worker_registry.rows(10.0) == []


def test_of_workers_that_are_shown_no_more_nothing_is_kept() -> None:
    worker_registry = WorkerRegistry()
    for number in range(100):  # a worker that is started again and again, as under Kubernetes
        worker_registry.record_heartbeat(
            Heartbeat(role="environment", worker=f"pod-{number}", counters={"episodes": 1.0}), now=float(number)
        )
    assert len(worker_registry.rows(now=99.0)) == len(worker_registry.list_heartbeats()) == 100
    assert [row.worker for row in worker_registry.rows(now=98.5 + RETENTION_SECONDS)] == ["pod-99"]
    assert [beat.worker for beat in worker_registry.list_heartbeats()] == ["pod-99"]


def test_episodes_wait_run_and_end() -> None:
    log = Log()
    for episode in ("a", "b", "c"):
        log.request(episode)
    log.claim("b")
    log.claim("c")
    log.finish("c", 1.0)
    rows = log.state.episodes.rows
    assert [log.state.describe_state(rows[episode]) for episode in ("a", "b", "c")] == ["waiting", "running", "completed"]
    numbers = build_numbers(RunView(log.state, now_ns=5 * SECOND))
    assert (numbers["requested"], numbers["waiting"], numbers["running"]) == (3, 1, 1)
    assert (numbers["oldest_open_seconds"], numbers["reward"]) == (4.0, 1.0)


def test_how_many_turns_extend_a_context_and_why_others_do_not() -> None:
    log = Log()
    log.request("a")
    log.finish("a", 1.0, turns=2)
    assert build_numbers(RunView(log.state, now_ns=SECOND))["turns_extending"] is None, (
        "nothing is said where every episode is one segment"
    )
    log.request("b")
    origin = SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent")
    segments = (
        EpisodeSegment(origin=None, first_turn=0, turns=6, tokens=60),
        EpisodeSegment(origin=origin, first_turn=6, turns=2, tokens=9),
    )
    log.finish("b", 1.0, turns=8, segments=segments)
    numbers = build_numbers(RunView(log.state, now_ns=SECOND))
    assert numbers["segments"] == {"sub_agent": 1}
    assert numbers["turns_extending"] == pytest.approx(0.7), "seven of ten: each segment has one that does not"
    samples = {(sample.name, sample.labels): sample.value for sample in collect(RunView(log.state, now_ns=SECOND))}
    assert samples["fleetbus_segments_total", ("sub_agent",)] == 1.0
    assert samples["fleetbus_turns_extending_ratio", ()] == numbers["turns_extending"]


def test_a_group_shows_rewards_spread_and_the_step_that_trained_it() -> None:
    log = Log()
    for episode, reward in (("a", 1.0), ("b", 0.0), ("c", None)):
        log.request(episode)
        log.finish(episode, reward, "completed" if reward is not None else "env_failed")
    log.request("d")
    log.request("other", group="h")
    log.finish("other", 0.0)
    log.add(SUBJECTS.train("default"), LineageStarted(lineage="a", worker="l"))
    log.step(4, "a", "a", "b")
    group = log.state.groups()[0]
    assert (group.group_id, group.episodes, group.graded, group.open, group.trained_in) == ("g", 5, 3, 1, 4)
    assert (group.rewards[:4], group.mean) == ([1.0, 0.0, None, None], 1 / 3)
    assert group.outcomes == {"completed": 3, "env_failed": 1, "waiting": 1}
    assert log.state.errors == {"boom": 1}


def test_steps_of_a_lineage_that_was_cut_leave_the_curves() -> None:
    log = Log()
    train = SUBJECTS.train("default")
    log.add(train, LineageStarted(lineage="a", worker="l"))
    for step in (1, 2, 3):
        log.step(step, "a")
    before = log.state.history
    log.add(train, LineageStarted(lineage="b", worker="m", parent="a", parent_step=1))
    log.step(2, "b")
    assert [(point.lineage, point.step) for point in log.state.training.steps] == [("a", 1), ("b", 2)]
    assert log.state.history == before + 1


def test_numbers_that_are_none_never_reach_the_page() -> None:
    log = Log()
    log.add(SUBJECTS.train("default"), LineageStarted(lineage="a", worker="l"))
    trained = StepTrained(lineage="a", step=1, version=1, episodes=(), metrics={"reward": float("nan"), "loss": 0.5})
    log.add(SUBJECTS.train("default"), trained)
    assert [point.metrics for point in log.state.training.steps] == [{"loss": 0.5}]


def test_only_so_many_episodes_are_kept() -> None:
    log = Log()
    extra = 1_001
    for index in range(KEPT_EPISODES + extra):
        log.state.episodes._get_row(f"e{index}", StreamEntry(subject="s", payload=b"", sequence=index, time_ns=0))
    log.request("newest")
    assert len(log.state.episodes.rows) == KEPT_EPISODES
    assert "newest" in log.state.episodes.rows


def test_only_so_many_episodes_are_kept_that_nobody_requested() -> None:
    log = Log()
    log.state = RunState(steps=10, kept_episodes=10)
    for index in range(2_000):
        log.claim(f"claimed{index}")
        log.finish(f"finished{index}", 1.0)
    assert len(log.state.episodes.rows) <= 1_010 and len(log.state._claimed) <= 1_010
    assert {"claimed1999", "finished1999"} <= log.state.episodes.rows.keys()


def test_of_error_classes_the_most_common_are_kept_by_their_beginnings() -> None:
    log = Log()
    for index in range(3 * MOST_ERROR_CLASSES):
        log.finish(f"a{index}", None, "env_failed", error_class=f"{index}" + "x" * 1_000)
        log.finish(f"b{index}", None, "env_failed", error_class="Timeout")
        assert len(log.state.errors) <= MOST_ERROR_CLASSES
    assert max(map(len, log.state.errors)) == 64
    assert log.state.errors.most_common(1) == [("Timeout", 3 * MOST_ERROR_CLASSES)]


def test_a_copy_of_the_page_forgets_no_episode(tmp_path: Path) -> None:
    async def read(_: list[str]) -> AsyncGenerator[StreamEntry]:
        return
        yield

    log, trained = Log(), TrainedTokensIndex(tmp_path)
    log.state = RunCopier(read, SUBJECTS, Redactor(), trained, steps=1, threshold=1.0, now_ns=0).state
    for index in range(KEPT_EPISODES + 1_001):
        log.state.episodes._get_row(f"e{index}", StreamEntry(subject="s", payload=b"", sequence=index, time_ns=0))
    log.request("newest")
    assert len(log.state.episodes.rows) == KEPT_EPISODES + 1_002


def observation(turn: int, attempt: int = 1, hop: int = 0) -> Observation:
    return Observation(
        episode_id="x", attempt=attempt, turn=turn, hop=hop, policy="default", messages=(), tokens_left=1,
        environment_lane="e0", deadline_ns=0,
    )  # fmt: skip


def action(turn: int, attempt: int = 1) -> Action:
    return Action(
        episode_id="x", attempt=attempt, turn=turn, text="", sampled=pack_ids([1]), logprobs=pack_logprobs([-0.5]), worker="i",
        seconds_queued=0.25, seconds_generating=0.5,
    )  # fmt: skip


def test_a_timeline_has_no_gaps_and_names_where_time_went() -> None:
    log = Log()
    log.request("x")
    log.claim("x", seconds=1.0)
    log.add(SUBJECTS.observation("default", "any", "x"), observation(0), 2.0)
    log.add(SUBJECTS.action("e0", "x"), action(0), 3.0)
    log.add(SUBJECTS.observation("default", "i0", "x"), observation(1), 5.0)
    log.add(SUBJECTS.observation("default", "any", "x"), observation(1, hop=1), 6.0)
    log.add(SUBJECTS.action("e0", "x"), action(1), 7.0)
    log.finish("x", 1.0, seconds=9.0)
    spans = [(span.kind, span.start, span.end) for span in timeline(log.entries)]
    assert spans == [
        ("waiting", 0.0, 1.0), ("open", 1.0, 2.0), ("queue", 2.0, 2.25), ("generate", 2.25, 2.75), ("travel", 2.75, 3.0),
        ("environment", 3.0, 5.0), ("queue", 5.0, 5.25), ("generate", 5.25, 5.75), ("travel", 5.75, 7.0),
        ("environment", 7.0, 8.25), ("verify", 8.25, 9.0),
    ]  # fmt: skip


def test_what_a_dead_worker_took_along_is_shown_as_lost() -> None:
    log = Log()
    log.request("x")
    log.claim("x", seconds=1.0)
    log.add(SUBJECTS.observation("default", "any", "x"), observation(0), 2.0)
    log.claim("x", attempt=2, seconds=12.0, worker="other")
    log.add(SUBJECTS.action("e0", "x"), action(0), 13.0)  # of the attempt before: nobody waits for it
    log.add(SUBJECTS.observation("default", "any", "x"), observation(0, attempt=2), 14.0)
    spans = [(span.kind, span.start, span.end, span.attempt) for span in timeline(log.entries)]
    assert spans == [("waiting", 0.0, 1.0, 0), ("open", 1.0, 2.0, 1), ("lost", 2.0, 12.0, 1), ("open", 12.0, 14.0, 2)]


def test_without_a_request_there_is_no_timeline() -> None:
    log = Log()
    log.claim("x")
    assert timeline(log.entries) == []


def test_without_a_tokenizer_that_can_be_read_ids_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert load_token_decoder(tmp_path).decode([1]) is None
    for content in ("", "{", '{"model": {}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        assert load_token_decoder(tmp_path).decode([1]) is None
