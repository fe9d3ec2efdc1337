"""The policies of seats in `top` and in the metrics: how far each learner is, and who serves those that nobody trains."""

from __future__ import annotations

import io

from msgspec.structs import replace
from rich.console import Console

from fleetbus.bus.base import StreamEntry
from fleetbus_schemas import (
    EpisodeRequested,
    Heartbeat,
    LineageStarted,
    Message,
    SeatPolicy,
    StepTrained,
    Subjects,
    Task,
    encode,
)
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.termination import Termination
from fleetbus_workers.observe.top.view import build_facts, screen

NOW = 1_000.0
SUBJECTS = Subjects("run")
SEATS = (SeatPolicy(seat="solver", policy="solver", trained=True), SeatPolicy(seat="customer", policy="customer"))
REQUEST = EpisodeRequested(
    episode_id="e",
    group_id="g",
    sample_index=0,
    split="train",
    task=Task(key="t"),
    policy="default",
    deadline_ns=1,
    seats=SEATS,
)


def build_state() -> RunState:
    """Of a run whose own learner is at step 7, and that of the seat's policy at step 5."""
    state = RunState(steps=9, joined=("solver",))
    entries: list[tuple[str, Message]] = [
        (SUBJECTS.train("default"), LineageStarted(lineage="l1", worker="learner")),
        (SUBJECTS.train("solver"), LineageStarted(lineage="l1", worker="learner-solver")),
        (SUBJECTS.task("default", "e"), REQUEST),
        (SUBJECTS.train("default"), StepTrained(lineage="l1", step=7, version=8, episodes=(), metrics={"reward": 1.0})),
    ]
    metrics = {"reward": 1.0, "reward_of_solver": 0.25, "staleness_mean": 1.5}
    entries.append((SUBJECTS.train("solver"), StepTrained(lineage="l1", step=5, version=6, episodes=(), metrics=metrics)))
    for sequence, (subject, message) in enumerate(entries, 1):
        state.apply(StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=sequence), message, NOW, 9)
    for worker, policy in (("inference", "default"), ("inference-solver", "solver")):
        state.worker_registry.record_heartbeat(Heartbeat(role="inference", worker=worker, policy=policy), NOW)
    return state


def render(view: RunView) -> str:
    console = Console(width=80, height=40, file=io.StringIO())
    console.print(screen(build_facts(view, run="r"), console))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_top_has_a_line_for_each_policy_of_a_seat() -> None:
    view = RunView(build_state(), now=NOW)
    text = render(view)
    assert "solver: step 5 · version 6 · reward 0.250 · staleness 1.5" in text
    assert "· served by inference-solver" in text.replace("\n  ", " · ")
    assert "customer: not trained · served by nobody" in text
    assert [row.workers for row in view.seat_policies] == [("inference-solver",), ()]
    ended = Termination(how="finished", since_ns=1, seconds=1.0, line="finished")
    assert "served by" not in render(RunView(build_state(), now=NOW, termination=ended))


def test_the_metrics_have_the_numbers_of_each_policy_and_those_of_the_run_are_of_its_own() -> None:
    found = {(sample.name, *sample.labels): sample.value for sample in collect(RunView(build_state(), now=NOW))}
    assert found["fleetbus_step",] == 7.0
    assert {key: value for key, value in found.items() if key[0].startswith("fleetbus_seat_policy")} == {
        ("fleetbus_seat_policy_step", "solver"): 5.0,
        ("fleetbus_seat_policy_version", "solver"): 6.0,
        ("fleetbus_seat_policy_staleness_steps", "solver"): 1.5,
        ("fleetbus_seat_policy_workers", "solver"): 1.0,
        ("fleetbus_seat_policy_workers", "customer"): 0.0,
    }


def test_a_run_of_one_policy_has_no_line_and_no_metric_of_another() -> None:
    state = RunState(steps=9)
    started = LineageStarted(lineage="l1", worker="learner")
    entry = StreamEntry(subject=SUBJECTS.train("default"), payload=encode(started), sequence=1, time_ns=1)
    state.apply(entry, started, NOW, 9)
    state.worker_registry.record_heartbeat(Heartbeat(role="inference", worker="inference", policy="default"), NOW)
    assert RunView(state, now=NOW).seat_policies == []


def test_names_that_requests_and_heartbeats_make_up_are_bounded_and_those_that_are_none_are_not_shown() -> None:
    state = build_state()
    for number in range(300):
        made_up = replace(REQUEST, seats=tuple(SeatPolicy(seat=f"s{each}", policy=f"p{number}-{each}") for each in range(40)))
        entry = StreamEntry(subject=SUBJECTS.task("default", f"e{number}"), payload=b"", sequence=9 + number, time_ns=9)
        state.apply(entry, made_up, NOW, 9)
    state.worker_registry.record_heartbeat(Heartbeat(role="inference", worker="inference-9", policy="\x1b[2J evil"), NOW)
    view = RunView(state, now=NOW)
    assert len(state.seat_policies) < 2 * MAX_SEATS and len(view.seat_policies) <= MAX_SEATS
    assert "evil" not in str(view.seat_policies)
    assert "more policies of seats" in render(view)
