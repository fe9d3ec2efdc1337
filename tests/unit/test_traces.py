"""A log as traces: what a span is, whose it is, and that nothing makes a second one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.trace_ids import build_turn_path, format_traceparent, is_sampled, span_id, trace_id
from fleetbus.recording import load_recording
from fleetbus_schemas import (
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    LineageStarted,
    Message,
    Observation,
    SegmentOrigin,
    StepTrained,
    Subjects,
    Task,
    ToolCall,
    encode,
)
from fleetbus_schemas.tokens import pack_ids
from fleetbus_schemas.training import Exclusion
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.otlp_file import request as otlp_request
from fleetbus_workers.observe.tracing.span import Span

RECORDINGS = Path(__file__).parents[1] / "replay" / "recordings"
SUBJECTS = Subjects("r")
SECOND = 1_000_000_000
DROPPED = SegmentOrigin(parent=0, kept=3, reason="context_dropped", repeated=2)


class Log:
    """Entries at given seconds, and the spans that they ended."""

    def __init__(self) -> None:
        self.entries: list[StreamEntry] = []
        self.traces = LogTraces("r")
        self.spans: list[Span] = []

    def add(self, subject: str, message: Message, seconds: float) -> None:
        entry = StreamEntry(
            subject=subject, payload=encode(message), sequence=len(self.entries) + 1, time_ns=int(seconds * SECOND)
        )
        self.entries.append(entry)
        self.spans += self.traces.add(entry)

    def request(self, seconds: float = 0.0, episode: str = "x") -> None:
        request = EpisodeRequested(
            episode_id=episode, group_id="g", sample_index=0, split="train", task=Task(key="t", prompt="a secret"),
            policy="default", deadline_ns=77,
        )  # fmt: skip
        self.add(SUBJECTS.task("default", episode), request, seconds)

    def claim(self, seconds: float, attempt: int = 1, episode: str = "x") -> None:
        claim = AttemptStarted(episode_id=episode, attempt=attempt, worker=f"env-{attempt}", nonce="n", lane="e0")
        self.add(SUBJECTS.episode(episode), claim, seconds)

    def observe(self, seconds: float, turn: int, attempt: int = 1, hop: int = 0) -> None:
        observation = Observation(
            episode_id="x", attempt=attempt, turn=turn, hop=hop, policy="default", messages=(), tokens_left=9,
            environment_lane="e0", deadline_ns=77,
        )  # fmt: skip
        self.add(SUBJECTS.observation("default", "any", "x"), observation, seconds)

    def act(self, seconds: float, turn: int, attempt: int = 1, tool: str = "", **segment: Any) -> None:
        calls = (ToolCall(name=tool),) if tool else ()
        action = Action(
            episode_id="x", attempt=attempt, turn=turn, text="", tool_calls=calls, sampled=pack_ids([1, 2, 3]), worker="inf",
            seconds_queued=0.25, seconds_generating=0.5, **segment,
        )  # fmt: skip
        self.add(SUBJECTS.action("e0", "x"), action, seconds)

    def finish(self, seconds: float, attempt: int = 1, outcome: str = "completed", episode: str = "x") -> None:
        result = EpisodeFinished(
            episode_id=episode, group_id="g", attempt=attempt, outcome=outcome, worker=f"env-{attempt}",  # type: ignore[arg-type]
            reward=1.0 if outcome == "completed" else None, timings={"verify": 0.5, "close": 0.25},
        )  # fmt: skip
        self.add(SUBJECTS.episode(episode), result, seconds)

    def train(self, seconds: float, *episodes: str, excluded: tuple[str, ...] = ()) -> None:
        step = StepTrained(
            lineage="l", step=1, version=1, episodes=episodes,
            excluded=tuple(Exclusion(episode_id=episode, reason="stale") for episode in excluded),
            metrics={"seconds_wait": 4.0, "seconds_read": 1.0, "seconds_train": 2.0},
        )  # fmt: skip
        self.add(SUBJECTS.train("default"), step, seconds)

    def list_spans(self) -> list[tuple[str, str, str, float, float]]:
        """Role, parent's name, name, start and end in seconds."""
        names = {(span.trace_id, span.span_id): span.name for span in self.spans}
        return [
            (
                span.role, names.get((span.trace_id, span.parent_id), ""), span.name, span.start_ns / SECOND,
                span.end_ns / SECOND,
            )
            for span in self.spans
        ]  # fmt: skip


def build_one_episode() -> Log:
    log = Log()
    log.request()
    log.claim(1.0)
    log.observe(2.0, 0)
    log.act(3.0, 0, tool="search")
    log.observe(5.0, 1)
    log.act(7.0, 1)
    log.finish(9.0)
    return log


def test_a_turn_says_which_segment_it_is_of_and_how_that_begins() -> None:
    log = Log()
    log.request()
    log.claim(1.0)
    played: list[dict[str, Any]] = [{}, {"segment": 1, "origin": DROPPED}, {"segment": 1}]
    for turn, segment in enumerate(played):
        log.observe(2.0 + turn, turn)
        log.act(2.5 + turn, turn, **segment)
    log.finish(9.0)
    told = [
        {name.removeprefix("fleetbus.segment"): value for name, value in span.attributes.items() if "segment" in name}
        for span in log.spans
        if span.name == "turn"
    ]
    begun = {"": 1, ".reason": "context_dropped", ".parent": 0, ".kept": 3, ".repeated": 2}
    assert told == [{}, begun, {"": 1}]


def test_an_episode_is_one_trace_whose_spans_say_who_had_it_when() -> None:
    log = build_one_episode()
    assert log.list_spans() == [
        ("environment", "episode", "queue", 0.0, 1.0),
        ("environment", "attempt", "open", 1.0, 2.0),
        ("inference", "turn", "queue", 2.0, 2.25),
        ("inference", "turn", "generate", 2.25, 2.75),
        ("environment", "turn", "tool", 3.0, 5.0),
        ("environment", "attempt", "turn", 2.0, 5.0),
        ("inference", "turn", "queue", 5.0, 5.25),
        ("inference", "turn", "generate", 5.25, 5.75),
        ("environment", "turn", "step", 7.0, 8.25),
        ("environment", "attempt", "turn", 5.0, 8.25),
        ("environment", "attempt", "verify", 8.25, 8.75),
        ("environment", "attempt", "close", 8.75, 9.0),
        ("environment", "episode", "attempt", 1.0, 9.0),
        ("environment", "", "episode", 0.0, 9.0),
    ]
    assert {span.trace_id for span in log.spans} == {trace_id("r", "x", 77)}
    generated = next(span for span in log.spans if span.name == "generate")
    assert generated.worker == "inf" and generated.attributes["gen_ai.usage.output_tokens"] == 3
    assert (generated.attributes["fleetbus.observation.sequence"], generated.attributes["fleetbus.action.sequence"]) == (3, 4)
    tool = next(span for span in log.spans if span.name == "tool")
    assert tool.worker == "env-1" and tool.attributes["gen_ai.tool.name"] == "search"
    root = log.spans[-1]
    assert root.attributes["fleetbus.request.sequence"] == 1 and root.attributes["fleetbus.result.sequence"] == 7
    assert root.attributes["fleetbus.reward"] == 1.0 and not root.error


def test_whoever_has_a_message_of_the_episode_names_the_same_trace_and_spans() -> None:
    trace = trace_id("r", "x", 77)
    turn = next(span for span in build_one_episode().spans if span.name == "turn")
    assert (turn.trace_id, turn.span_id) == (trace, span_id(trace, build_turn_path(1, 0)))
    assert format_traceparent(trace, build_turn_path(1, 0)) == "00-db8f59da6d3833de431a486b2f2345e1-203dc488040e8b3f-01", (
        "ids never change"
    )
    assert len({trace, trace_id("r", "x", 78), trace_id("r2", "x", 77), trace_id("r", "y", 77)}) == 4


def test_what_is_repeated_makes_no_second_span() -> None:
    log = Log()
    log.request()
    log.request(0.5)
    log.claim(1.0)
    log.observe(2.0, 0)
    log.observe(2.5, 0, hop=1)
    log.act(3.0, 0, tool="search")
    log.act(3.5, 0, tool="search")
    log.observe(3.7, 0, hop=2)
    log.observe(5.0, 1)
    log.act(5.5, 0)
    log.act(7.0, 1)
    log.finish(9.0)
    log.finish(9.5)
    log.request(10.0)
    once = build_one_episode()
    assert [span[2:] for span in log.list_spans()] == [span[2:] for span in once.list_spans()]
    assert [span.span_id for span in log.spans] == [span.span_id for span in once.spans]
    turn = next(span for span in log.spans if span.name == "turn")
    assert turn.attributes["fleetbus.hops"] == 1 and turn.attributes["fleetbus.observation.sequence"] == 5


def test_a_lost_worker_leaves_a_span_that_says_how_long_nobody_had_the_episode() -> None:
    log = Log()
    log.request()
    log.claim(1.0)
    log.observe(2.0, 0)
    log.claim(12.0, attempt=2)
    log.act(13.0, 0)
    log.observe(14.0, 0, attempt=2)
    log.act(15.0, 0, attempt=2)
    log.finish(16.0, attempt=2)
    first = next(span for span in log.spans if span.name == "attempt")
    assert first.error == "its worker was lost" and first.attributes["fleetbus.attempt.end"] == "taken over"
    assert ("environment", "episode", "lost", 2.0, 12.0) in log.list_spans()
    assert Counter(span.name for span in log.spans)["attempt"] == 2
    assert [span.worker for span in log.spans if span.name == "attempt"] == ["env-1", "env-2"]
    assert Counter(span.name for span in log.spans)["generate"] == 1


def test_a_handed_back_episode_queues_again_and_nothing_of_it_failed() -> None:
    log = Log()
    log.request()
    log.claim(1.0)
    log.observe(2.0, 0)
    log.add(SUBJECTS.episode("x"), AttemptReleased(episode_id="x", attempt=1, worker="env-1"), 3.0)
    log.claim(6.0, attempt=2)
    log.finish(8.0, attempt=2)
    queues = [(start, end) for _, _, name, start, end in log.list_spans() if name == "queue"]
    assert queues == [(0.0, 1.0), (3.0, 6.0)]
    (first, _) = [span for span in log.spans if span.name == "attempt"]
    assert first.attributes["fleetbus.attempt.end"] == "handed back" and not first.error


def test_an_episode_that_nobody_played_is_a_failed_trace() -> None:
    log = Log()
    log.request()
    log.finish(9.0, outcome="timeout")
    assert [(span.name, bool(span.error)) for span in log.spans] == [("queue", True), ("episode", True)]


def test_training_is_a_trace_of_its_own_that_is_linked_with_its_episodes() -> None:
    log = Log()
    log.add(SUBJECTS.train("default"), LineageStarted(lineage="l", worker="lea"), 0.0)
    for episode in ("x", "y", "z"):
        log.request(episode=episode)
        log.claim(1.0, episode=episode)
        log.finish(9.0, episode=episode)
    log.spans.clear()
    log.train(20.0, "x", "y", excluded=("z",))
    told = log.list_spans()
    assert told.count(("learner", "", "batch", 9.0, 17.0)) == 2 and told.count(("learner", "", "train", 18.0, 20.0)) == 2
    assert ("learner", "", "batch", 9.0, 20.0) in told, "z was excluded when the step was stored"
    assert told[-4:] == [
        ("learner", "", "training step", 13.0, 20.0),
        ("learner", "training step", "wait", 13.0, 17.0),
        ("learner", "training step", "read", 17.0, 18.0),
        ("learner", "training step", "train", 18.0, 20.0),
    ]
    step = log.spans[-4]
    assert step.worker == "lea" and {trace for trace, _ in step.links} == {trace_id("r", each, 77) for each in ("x", "y")}
    train = log.spans[1]
    assert train.links == ((step.trace_id, step.span_id),) and train.parent_id == span_id(train.trace_id)


@pytest.mark.parametrize("name", ["guessing", "warehouse"])
def test_every_span_of_a_real_run_has_its_parent_around_it_and_an_id_of_its_own(name: str) -> None:
    recording = load_recording(RECORDINGS / f"{name}.fbrec")
    traces = LogTraces("small")
    spans = [span for entry in recording.entries for span in traces.add(entry)]
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    assert len(by_id) == len(spans) and traces.open == 0
    results = sum(1 for entry in recording.entries if b"EpisodeFinished" in entry.payload)
    assert results and traces.episodes == results == sum(span.name == "episode" for span in spans)
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.parent_id:
            parent = by_id[span.trace_id, span.parent_id]
            outside = span.role == "learner" and parent.name == "episode"
            assert outside or parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns, span


def test_the_ratio_of_traces_is_kept_by_trace_and_not_by_span() -> None:
    kept = [is_sampled(trace_id("r", f"e{number}", number), 0.25) for number in range(2000)]
    assert 400 < sum(kept) < 600
    assert not is_sampled(trace_id("r", "e", 1), 0.0) and is_sampled((1 << 128) - 1, 1.0)
    traces = LogTraces("r", ratio=0.0)
    assert [span for entry in build_one_episode().entries for span in traces.add(entry)] == []


def test_what_was_said_in_an_episode_is_in_no_trace() -> None:
    log = build_one_episode()
    assert b"a secret" not in msgspec.json.encode(otlp_request(log.spans, "r"))


def test_only_the_wanted_episodes_have_traces() -> None:
    entries = build_one_episode().entries
    assert [span for entry in entries for span in LogTraces("r", episodes=["y"]).add(entry)] == []
    only = LogTraces("r", episodes=["x"])
    assert len([span for entry in entries for span in only.add(entry)]) == 14
