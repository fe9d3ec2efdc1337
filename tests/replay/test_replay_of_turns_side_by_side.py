"""Turns that were sampled side by side are recorded, shown, traced and replayed as turns that were asked one after another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fleetbus.recording import Recording, RecordingHeader
from fleetbus.recording.episodes import read_transcript
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.replay.driver import ReplayContext
from fleetbus_workers.replay.environment_driver import replay_environment
from fleetbus_workers.replay.inference_driver import replay_inference
from fleetbus_workers.replay.options import Replay
from tests.support.small_deployment import RUN
from tests.support.virtual_time import virtual_time
from tests.system.test_segments_taken_over import Killer
from tests.system.test_turns_side_by_side import SEATS, TURNS, Helpers, Played, Round, play, show

anyio_backend = virtual_time

pytestmark = pytest.mark.integration


def record(played: Played) -> Recording:
    return Recording(path=Path("in-memory"), header=RecordingHeader(run=RUN), entries=played.entries)


@pytest.mark.parametrize("make", [Round, Helpers])
@pytest.mark.parametrize("role", ["", "environment", "inference"])
async def test_they_replay_as_recorded_also_after_a_takeover(make: type[Round], role: str) -> None:
    recording = record(await play(Killer(role, ("asked", 6)), make=make))
    context = ReplayContext(recording, Replay(patience_seconds=30))
    await replay_environment(context, make)
    context.report.check()
    assert context.report.compared == {"Observation": TURNS, "EpisodeFinished": 1}
    context = ReplayContext(recording, Replay(role="inference", patience_seconds=30))
    await replay_inference(context, ScriptedSampler(), ScriptedTemplate())
    context.report.check()
    assert context.report.compared == {"Action": TURNS}


async def test_a_changed_turn_that_was_told_ahead_is_found_and_named() -> None:
    class Changed(Round):
        async def step(self, action: object) -> object:  # type: ignore[override]
            step = await super().step(action)  # type: ignore[arg-type]
            return type(step)(messages=show(7, "x"), seat=step.seat) if self._played == 6 else step

    context = ReplayContext(record(await play()), Replay(patience_seconds=30))
    await replay_environment(context, Changed)  # type: ignore[arg-type]
    assert context.report.first is not None
    assert context.report.first.message.startswith("Observation of turn 6"), context.report.first


async def test_a_transcript_has_them_in_their_order_each_with_what_it_was_shown() -> None:
    played = await play()
    own = [entry for entry in played.entries if entry.subject.endswith(".e")]
    turns = read_transcript(own).turns
    assert [turn.turn for turn in turns] == list(range(TURNS))
    assert [turn.seat for turn in turns] == [SEATS[turn % 4] for turn in range(TURNS)]
    assert [turn.messages for turn in turns] == [show(turn // 4, SEATS[turn % 4]) for turn in range(TURNS)]
    assert all(turn.action is not None for turn in turns)


async def test_a_trace_has_a_span_of_each_turn_which_begins_when_it_was_sent() -> None:
    played = await play()
    traces = LogTraces(RUN)
    spans = [span for entry in played.entries for span in traces.add(entry)]
    counted = Counter(span.name for span in spans)
    assert counted["turn"] == TURNS and counted["step"] == TURNS
    chats = [span for span in spans if "fleetbus.policy.versions" in span.attributes]
    assert len(chats) == TURNS
    turns = sorted((span.start_ns, span.end_ns) for span in spans if span.name == "turn")
    begun = [sum(start <= moment < end for start, end in turns) for moment, _ in turns]
    assert max(begun) == len(SEATS), "those of a round are under way at once"
