"""A message counts on its own subject only: rights are by subject, and no key may say what another one's owner did."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import LimitSettings
from fleetbus.delivery.heartbeats import follow_heartbeats
from fleetbus.recording.episodes import EpisodeIndex
from fleetbus.recording.rows import TranscriptFold
from fleetbus_schemas import Heartbeat, LineageStarted, Message, Subjects, TrainingFinished, WorkerFailed, encode
from fleetbus_workers.observe.metrics.numbers import build_numbers
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.up.display import Display, PlainDisplay
from fleetbus_workers.up.log_follower import Follower
from fleetbus_workers.up.progress_guard import ProgressGuard
from fleetbus_workers.up.restarts import Achievements
from tests.support.folded_log import LINEAGE, NOW_NS, SUBJECTS, build_entries, claim, finished, fold, requested
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

ENDED = TrainingFinished(lineage="l1", step=3, version=1)


@pytest.mark.parametrize(
    "forged",
    [
        (SUBJECTS.episode("e1"), ENDED),
        (SUBJECTS.life("environment", "w"), ENDED),
        (SUBJECTS.policy("default"), ENDED),
        (SUBJECTS.life("environment", "w"), WorkerFailed(role="learner", worker="learner", error_class="E", error="e")),
        (SUBJECTS.life("environment", "w"), WorkerFailed(role="environment", worker="x", error_class="E", error="e")),
        (SUBJECTS.episode("e2"), claim("e1")),
        (SUBJECTS.episode("e2"), finished(1)[1]),
        (f"{SUBJECTS.episode('e2')}.e1", finished(1)[1]),
        requested(2, "e1"),
        (SUBJECTS.episode("e1"), requested(1)[1]),
        (SUBJECTS.task("default", "e1"), finished(1)[1]),
    ],
)
def test_a_message_counts_on_its_own_subject_only(forged: tuple[str, Message]) -> None:
    state = fold(LINEAGE, requested(1), forged)
    assert state.malformed == 1 and not state.training.is_finished and not state.termination_state.is_known
    numbers = build_numbers(RunView(state, now_ns=NOW_NS))
    assert (numbers["waiting"], numbers["running"], numbers["finished_episodes"]) == (1, 0, 0)
    assert state.worker_registry.rows(0.0) == []
    index = EpisodeIndex()
    for entry in build_entries(requested(1), forged):
        index.add(entry)
    assert [(row.episode_id, row.outcome, row.worker) for row in index.rows.values()] == [("e1", "", "")]


def test_a_transcript_ends_with_the_result_of_its_own_episode() -> None:
    subject = SUBJECTS.episode("e1")
    entries = build_entries(
        requested(1), (subject, finished(2)[1]), (subject, claim("e2")), (subject, claim("e1")), finished(1)
    )
    fold = TranscriptFold()
    (found,) = [transcript for entry in entries if (transcript := fold.add(entry)) is not None]
    assert found.result == finished(1)[1] and found.claims == (claim("e1"),)
    assert found.request == requested(1)[1]


def test_a_message_counts_on_its_own_subject() -> None:
    failed = WorkerFailed(role="learner", worker="learner", error_class="E", error="e")
    messages = [LINEAGE, requested(1), (SUBJECTS.episode("e1"), claim("e1")), finished(1), (SUBJECTS.train("default"), ENDED)]
    state = fold(*messages, (SUBJECTS.life("learner", "learner"), failed))
    assert not state.malformed and state.training.is_finished and state.termination_state.last_entry == failed
    assert state.describe_state(state.episodes.rows["e1"]) == "completed"


def test_a_lineage_counts_once_in_a_run_of_any_name() -> None:
    subjects = Subjects("train")
    started = LineageStarted(lineage="l1", worker="w")
    assert fold((subjects.train("default"), started), (subjects.policy("default"), started)).history == 1


async def test_the_followers_of_a_log_pass_over_an_end_that_an_environment_worker_stored() -> None:
    with anyio.fail_after(30):
        async with MemoryServer().connect("r") as bus:
            await bus.declare(plan_run("r", lanes=1))
            for subject, message in (LINEAGE, (SUBJECTS.episode("e1"), ENDED), finished(2)):
                await bus.publish(subject, encode(message))
            progress, state = Progress(10), RunState(10)
            await follow(bus, progress)
            assert (progress.episodes, progress.training.is_finished) == (1, False)
            watch = RunObserver(bus, SUBJECTS, state)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch.run)
                await anyio.sleep(5)
                tasks.cancel_scope.cancel()
            assert (state.progress.episodes, state.training.is_finished, state.malformed) == (1, False, 1)


async def follow(bus: MemoryBus, progress: Progress) -> None:
    display: Display = PlainDisplay(progress, lambda text: None)
    await Follower(bus, SUBJECTS, "default", progress, display, ProgressGuard(LimitSettings(), 0.0), Achievements()).finish()


async def test_a_heartbeat_in_the_name_of_another_is_ignored() -> None:
    heard: list[str] = []
    with anyio.fail_after(30):
        async with MemoryServer().connect("r") as bus, anyio.create_task_group() as tasks:
            await bus.declare(plan_run("r", lanes=1))
            tasks.start_soon(
                follow_heartbeats, bus, SUBJECTS.heartbeats, lambda beat: heard.append(f"{beat.role} {beat.worker}")
            )
            await anyio.sleep(1)
            for beat in (
                Heartbeat(role="learner", worker="w", paused=True),
                Heartbeat(role="environment", worker="x"),
                Heartbeat(role="environment", worker="w"),
            ):
                await bus.broadcast(SUBJECTS.heartbeat("environment", "w"), encode(beat))
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
    assert heard == ["environment w"]
