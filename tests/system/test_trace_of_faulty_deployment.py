"""Traces of a fleet in which workers are killed and drained: one tree per episode, whoever had it, and nothing twice."""

from __future__ import annotations

from collections import Counter

import anyio

from fleetbus_schemas import Task
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.span import Span
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

EPISODES = 12

anyio_backend = virtual_time


async def spans_of(fleet: SmallDeployment) -> list[Span]:
    traces = LogTraces(RUN)
    spans = [span async for entry in fleet.bus.scan([fleet.subjects.log]) for span in traces.add(entry)]
    assert traces.open == 0 and traces.episodes == EPISODES
    return spans


async def test_every_episode_is_one_tree_and_every_attempt_is_in_it() -> None:
    async with small_deployment(build_configuration()) as fleet:
        doomed = fleet.environment("env-killed")
        draining = fleet.environment("env-drained")
        fleet.inference("inf-killed", sampler=ScriptedSampler(delay=lambda request: 1.0)).is_expected_to_fail = True
        fleet.inference("inf", sampler=ScriptedSampler(delay=lambda request: 1.0))
        await fleet.heard(*fleet.members.values())
        for number in range(EPISODES):
            await fleet.request(f"e{number}", task=Task(key="t"))
        await anyio.sleep(1.5)
        doomed.kill()
        fleet.members["inf-killed"].kill()
        draining.drain.set()
        fleet.environment("env")
        await fleet.all_results(EPISODES)
        spans = await spans_of(fleet)
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    assert len(by_id) == len(spans), "a span came twice"
    roots = [span for span in spans if not span.parent_id]
    assert Counter(span.name for span in roots) == {"episode": EPISODES}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.parent_id:
            parent = by_id[span.trace_id, span.parent_id]
            assert parent.start_ns <= span.start_ns and span.end_ns <= parent.end_ns
    ends = Counter(span.attributes["fleetbus.attempt.end"] for span in spans if span.name == "attempt")
    assert ends["completed"] == EPISODES and ends["taken over"] > 0
    lost = [span for span in spans if span.name == "lost"]
    assert len(lost) == ends["taken over"] and {span.worker for span in lost} == {"env-killed"}
    assert all(span.end_ns - span.start_ns > 5e9 for span in lost), "nobody had them until the lease ran out"
    answered = [span for span in spans if span.name == "generate"]
    assert {span.worker for span in answered} <= {"inf", "inf-killed"} and all(span.role == "inference" for span in answered)
    rerouted = [span for span in spans if span.name == "turn" and span.attributes["fleetbus.hops"]]
    assert rerouted, "observations of the killed inference worker went to the other one"
