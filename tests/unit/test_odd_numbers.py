"""Numbers and names that no honest worker writes, and rewards that only few environments give: every view of a run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.streams import plan_run
from fleetbus.core.algorithms.means import compute_mean, compute_spread
from fleetbus.core.training.evaluation_summary import summarise_results
from fleetbus.delivery.lanes import MAX_LEASE_SECONDS, Lane, NoLaneFree, claim_lane
from fleetbus.recording.episodes import MAX_STAGES, keep_timings, read_transcript
from fleetbus.recording.rows import NO_VERSION, build_token_row
from fleetbus_schemas import (
    NEW_ROOT,
    Action,
    EpisodeSegment,
    Heartbeat,
    LaneLease,
    LineageStarted,
    Observation,
    SegmentOrigin,
    StepTrained,
    Task,
    encode,
)
from fleetbus_schemas.action import VersionSpan
from fleetbus_schemas.session import SessionAnswer, SessionCall, SessionClaimed, SessionRecorded
from fleetbus_schemas.tokens import pack_ids, take_tokens, unpack_ids
from fleetbus_workers.cli.look.transcript import build_facts as list_facts
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.numbers import build_numbers
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.monitor.episode_table import build_csv, choose_rows
from fleetbus_workers.observe.monitor.reward_histogram import build_reward_histogram
from fleetbus_workers.observe.monitor.success_table import build_success_table
from fleetbus_workers.observe.monitor.token_decoder import TokenDecoder
from fleetbus_workers.observe.run.jetstream import ServerView
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.training_history import StepPoint, TrainingHistory
from fleetbus_workers.observe.run.watchdog import find_stalls
from fleetbus_workers.observe.top.view import build_facts, screen
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.otlp_file import request as otlp_request
from fleetbus_workers.up.display import render_live_view
from fleetbus_workers.up.summary_builder import Summary, build_summary
from tests.support.folded_log import LINEAGE, NOW_NS, SECOND, SUBJECTS, build_entries, claim, finished, fold, requested
from tests.support.virtual_time import virtual_time

INF, NAN = math.inf, math.nan

anyio_backend = virtual_time


def look_everywhere(state: RunState) -> dict[str, float]:
    """Every view of a run, once; what the exporter says, by name and labels."""
    assert not state.malformed
    health, rows = LogHealth(), state.episodes.rows
    facts = build_facts(RunView(state, health, ServerView(), [], now=0.0, now_ns=NOW_NS), run="r")
    screen(facts)
    stalls = find_stalls(state, health, now=0.0, now_ns=NOW_NS)
    described: dict[str, Callable[[], Any]] = {
        "top --json": lambda: facts,
        "groups": state.groups,
        "rows": lambda: [
            msgspec.structs.asdict(row) for row in choose_rows(rows.values(), state.describe_state, {"sort": "reward"})
        ],
        "success": lambda: build_success_table(rows.values(), {}, threshold=1.0),
        "rewards": lambda: build_reward_histogram(rows.values(), dict.fromkeys(rows, 1)),
        "curves": lambda: (state.training.steps, state.training.evaluations),
        "stalls": lambda: stalls,
    }
    for name, view in described.items():
        json.loads(msgspec.json.encode(view()), parse_constant=lambda constant, name=name: pytest.fail(f"{constant} in {name}"))  # type: ignore[misc]
    build_csv(list(rows.values()), state.describe_state)
    samples = collect(RunView(state, health, ServerView(), stalls, now=0.0, now_ns=NOW_NS))
    return {" ".join((sample.name, *sample.labels)): sample.value for sample in samples}


# Rewards and times


@pytest.mark.parametrize(
    ("rewards", "mean", "spread"),
    [
        ([1.0, INF, -INF, 0.0], 0.5, 0.5),
        ([NAN, 1.0, 0.0], 0.5, 0.5),
        ([1e308] * 4, 1e308, 0.0),
        ([0.0, 1e200], 5e199, 5e199),
        ([-1.7e308, 1.7e308], 0.0, 1.7e308),
        ([INF, NAN], None, None),
    ],
)
def test_odd_rewards_do_not_hide_the_others(rewards: list[float], mean: float | None, spread: float | None) -> None:
    state = fold(*(finished(number, reward=reward) for number, reward in enumerate(rewards)))
    assert len(state.episodes.rows) == len(rewards)
    (group,) = state.groups()
    assert (group.mean, group.spread) == (mean, spread)
    assert build_numbers(RunView(state, now_ns=NOW_NS))["reward"] == mean
    assert look_everywhere(state).get("fleetbus_reward_mean") == mean
    (row,) = build_success_table(state.episodes.rows.values(), {}, threshold=1.0)
    assert row.mean == mean


def test_a_huge_reward_is_shown_with_its_episode() -> None:
    state = fold(finished(1, reward=1e200), finished(2, reward=0.5), finished(3, reward=NAN))
    assert [state.episodes.rows[name].reward for name in ("e1", "e2")] == [1e200, 0.5]
    rows = choose_rows(state.episodes.rows.values(), state.describe_state, {"sort": "-reward"})
    assert [row.episode_id for row in rows] == ["e1", "e2", "e3"], "NaN has no place in the order"
    assert look_everywhere(state)["fleetbus_reward_quantile game 0.9"] == 1e200


def test_means_of_ordinary_numbers_are_exact() -> None:
    assert compute_mean([0.1] * 10) == 0.1
    assert compute_spread([0.1] * 10) == 0.0 and compute_spread([0.0, 1.0]) == 0.5
    assert compute_mean([]) is None and compute_spread([]) is None


def test_an_evaluation_ends_with_a_summary_whatever_a_result_says() -> None:
    results = [finished(number, reward=reward)[1] for number, reward in enumerate((INF, -INF, 1.0, 0.0))]
    assert summarise_results(results, [1]).mean_reward == 0.5


@pytest.mark.parametrize("odd", [INF, -INF, NAN, 1e308, -1.0])
def test_times_that_are_none_do_not_hide_the_others(odd: float) -> None:
    timings = {"odd": odd, "verify": 0.5}
    state = fold(*(finished(number, timings=timings) for number in range(4)))
    shown = look_everywhere(state)
    assert shown["fleetbus_episode_stage_seconds verify"] == 0.5
    assert "fleetbus_episode_stage_seconds odd" not in shown
    written = msgspec.json.encode(build_summary(state.progress, run="r", seed=1, wall_seconds=1.0))
    assert msgspec.json.decode(written, type=Summary).seconds_by_stage == {"episode_verify": 2.0}


def test_a_result_adds_a_bounded_number_of_stages() -> None:
    assert len(keep_timings({f"s{number}": 1.0 for number in range(10_000)})) == MAX_STAGES
    assert keep_timings({"a": 1e308, "b": -1e308}) == {}


def test_segments_of_an_episode_without_turns_divide_by_nothing() -> None:
    origin = SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent")
    segments = (
        EpisodeSegment(origin=None, first_turn=0, turns=0, tokens=0),
        EpisodeSegment(origin=origin, first_turn=0, turns=0, tokens=0),
    )
    look_everywhere(fold(finished(1, turns=0, segments=segments)))


@pytest.mark.parametrize("odd", [INF, -INF, NAN])
def test_odd_counters_of_a_heartbeat_do_not_hide_the_stages_of_others(odd: float) -> None:
    beats = [
        Heartbeat(role="environment", worker="odd", slots=3, counters={"begun_open": odd}),
        Heartbeat(role="environment", worker="w", slots=1, in_flight=1, counters={"begun_verify": 3.0, "ended_verify": 2.0}),
        Heartbeat(role="inference", worker="i", slots=1, policy_version=0),
    ]
    state = fold(requested(1), (SUBJECTS.episode("e1"), claim("e1")), beats=beats)
    look_everywhere(state)
    reasons = [stall.reason for stall in find_stalls(state, LogHealth(), now=0.0, now_ns=NOW_NS)]
    assert any("(1 in verify)" in reason for reason in reasons), reasons


def test_a_step_below_zero_does_not_fill_the_screen() -> None:
    progress = Progress(50)
    progress.apply(StepTrained(lineage="l1", step=-(2**63), version=0, episodes=()), 0)
    render_live_view(progress, [], 1.0)


# Traces, lanes, histories


@pytest.mark.parametrize("odd", [INF, -INF, NAN, 1e308])
def test_traces_of_odd_numbers_are_whole_and_can_be_read(odd: float) -> None:
    observation = Observation(
        episode_id="e1",
        attempt=1,
        turn=0,
        environment_lane="e0",
        policy="default",
        messages=(),
        deadline_ns=0,
        tokens_left=9,
    )
    action = Action(
        episode_id="e1", attempt=1, turn=0, worker="i", text="", prompt_delta=pack_ids([1]), sampled=pack_ids([2]),
        logprobs=b"", versions=(), finish_reason="stop", history_hash=b"", seconds_queued=odd, seconds_generating=odd,
    )  # fmt: skip
    result = finished(1, timings={"verify": odd, "close": odd}, reward=odd, reward_components={"judge": odd}, tokens=2**64 - 1)
    metrics = {"seconds_wait": odd, "seconds_train": odd}
    call, answer = SessionCall(session="s", call="open", key="k"), SessionAnswer(session="s", key="k")
    record = SessionRecorded(session="s", call=call, answer=answer, seconds=odd)
    traces = LogTraces("r")
    spans = []
    for entry in build_entries(
        LINEAGE,
        requested(1),
        (SUBJECTS.episode("e1"), claim("e1")),
        (SUBJECTS.observation("default", "any", "e1"), observation),
        (SUBJECTS.action("e0", "e1"), action),
        result,
        (SUBJECTS.train("default"), StepTrained(lineage="l1", step=1, version=1, episodes=("e1",), metrics=metrics)),
        (SUBJECTS.session("s"), SessionClaimed(session="s", attempt=1, worker="w", nonce="n", task=Task(key="t"))),
        (SUBJECTS.session("s"), record),
    ):
        spans += traces.add(entry)
    assert {"episode", "generate", "verify", "training step", "open"} <= {span.name for span in spans}
    assert all(SECOND <= span.start_ns <= span.end_ns <= 9 * SECOND for span in spans)
    line = json.loads(msgspec.json.encode(otlp_request(spans, "r")))
    values = [
        attribute["value"]
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
        for attribute in span["attributes"]
    ]
    assert all(
        value["doubleValue"] is not None and math.isnan(odd) == math.isnan(float(value["doubleValue"]))
        for value in values
        if "doubleValue" in value
    )
    assert all(int(value["intValue"]) < 2**63 for value in values if "intValue" in value)


async def take_lane(bus: MemoryBus, wait_seconds: float) -> Lane:
    return await claim_lane(bus, SUBJECTS, role="environment", names=("e0",), worker="x", nonce="x", wait_seconds=wait_seconds)


@pytest.mark.parametrize(("seconds", "is_free"), [(NAN, True), (-INF, True), (INF, False), (1e300, False)])
async def test_a_lease_that_is_no_time_holds_a_lane_for_a_minute_at_most(seconds: float, is_free: bool) -> None:
    async with MemoryServer().connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        lease = LaneLease(worker="w", nonce="n", lease_seconds=seconds)
        await bus.publish(SUBJECTS.lane("environment", "e0"), encode(lease))
        if not is_free:
            with pytest.raises(NoLaneFree):
                await take_lane(bus, wait_seconds=MAX_LEASE_SECONDS / 2)
        assert (await take_lane(bus, wait_seconds=MAX_LEASE_SECONDS)).name == "e0"


def test_tokens_that_are_torn_are_shown_as_far_as_they_are_whole() -> None:
    assert unpack_ids(take_tokens(pack_ids([1, 2, 3]) + b"x", 100)) == [1, 2, 3]
    assert unpack_ids(take_tokens(pack_ids([1, 2, 3]), 2)) == [1, 2]


def test_an_action_whose_tokens_are_torn_is_shown_by_the_page_and_as_a_transcript() -> None:
    pytest.importorskip("starlette")
    from fleetbus_workers.observe.monitor.episode_view import describe_action

    torn = pack_ids([7]) + b"x"
    action = Action(episode_id="e1", attempt=1, turn=0, text="", prompt_delta=torn, sampled=torn, logprobs=torn)
    page = describe_action(action, TokenDecoder())
    assert (page["ids"], page["prompt_ids"], len(page["logprobs"])) == ([7], [7], 1)
    entries = build_entries((SUBJECTS.episode("e1"), claim("e1")), (SUBJECTS.action("e0", "e1"), action))
    facts = cast(dict[str, Any], list_facts(read_transcript(entries), tokens=True))
    assert facts["turns"][0]["action"]["sampled"] == [7]


def test_values_that_json_has_not_are_shown_as_text() -> None:
    _, result = finished(1, info={"cells": {(1, 2): 3}, "other": msgspec.msgpack.Ext(5, b"x"), "odd": NAN})
    facts = cast(dict[str, Any], list_facts(read_transcript(build_entries((SUBJECTS.episode("e1"), result))), tokens=False))
    assert facts["result"]["info"]["cells"] == {"(1, 2)": 3} and "Ext" in facts["result"]["info"]["other"]
    assert not {"loss_mask"} & facts["result"].keys()


def test_an_action_that_claims_versions_of_more_tokens_than_it_has_is_a_row() -> None:
    spans = (VersionSpan(version=3, start=-5, stop=1), VersionSpan(version=4, start=1, stop=2**62))
    sampled = pack_ids([7, 8])
    action = Action(episode_id="e1", attempt=1, turn=0, text="", prompt_delta=sampled + b"x", sampled=sampled, versions=spans)
    entries = build_entries((SUBJECTS.episode("e1"), claim("e1")), (SUBJECTS.action("e0", "e1"), action))
    row = build_token_row(read_transcript(entries))
    assert (row.ids, row.versions) == ((7, 8, 7, 8), (NO_VERSION, NO_VERSION, 3, 4))


def test_many_restarts_do_not_count_all_steps_again_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[StepPoint] = []
    real = TrainingHistory._count

    def count(history: TrainingHistory, point: StepPoint) -> None:
        counted.append(point)
        real(history, point)

    monkeypatch.setattr(TrainingHistory, "_count", count)
    history = TrainingHistory()
    for step in range(1, 201):
        started = LineageStarted(lineage=f"l{step}", worker="w", parent=f"l{step - 1}", parent_step=step - 2)
        history.apply(started, 0)
        history.apply(StepTrained(lineage=f"l{step}", step=step, version=step, episodes=()), 0)
    assert [point.step for point in history.steps] == [200], "each lineage voids the step of the one before"
    history.apply(StepTrained(lineage="l200", step=201, version=201, episodes=()), 0)
    assert [point.step for point in history.steps] == [200, 201] and len(counted) == 201
