"""A learner that was killed and started again has lineages; each is replayed from where it began, or named as left out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import trio.testing

from fleetbus.bus.base import StreamEntry
from fleetbus.config.run_folder import policy_folder
from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.log.episodes import decode_entries
from fleetbus.logs.setup import suppress_logs
from fleetbus.recording import Recording, RecordingHeader
from fleetbus_schemas import (
    CheckpointStored,
    FloorRaised,
    LineageStarted,
    StepTrained,
    Subjects,
    Task,
    TensorEntry,
    decode,
    encode,
)
from fleetbus_schemas.channels import STORED
from fleetbus_workers.learner.checkpoints import INDEX, Checkpoint
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.held_out import find_newest_version, play
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.replay.driver import ReplayContext
from fleetbus_workers.replay.learner_replay import replay_learner
from fleetbus_workers.replay.options import Replay
from fleetbus_workers.replay.report import Report
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment

pytestmark = pytest.mark.timeout(300)

STEPS = 5
PATIENCE_SECONDS = 60.0
TASKS = [Task(key=f"task-{index}", prompt="play") for index in range(4)]


class CountingTrainer(ScriptedTrainer):
    """Its manifests tell one number of updates from another, as hashes of real weights do."""

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        (entry,) = super().save_weights(file)
        return (msgspec.structs.replace(entry, sha256=f"{self.updates:064x}"),)


def settings(folder: Path, checkpoint_every: int) -> Configuration:
    return build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        learner=LearnerSettings(steps=STEPS, groups=2, group_size=4, checkpoint_every=checkpoint_every),
        evaluation=EvaluationSettings(episodes=2),
    )


async def until_stored(fleet: SmallDeployment, kind: type[Any], lineage: str, step: int, *, policy: str = "default") -> None:
    async with fleet.bus.read([fleet.subjects.train(policy)]) as reader:
        while True:
            for _, found in decode_entries(kind, [await reader.receive()], beside=STORED["train"]):
                if (found.lineage, found.step) == (lineage, step):
                    return


async def killed(configuration: Configuration, kills: tuple[tuple[type[Any], int], ...], *, drained: bool = False) -> Recording:
    """A run whose learner is killed at each of these entries, or told to stop, and started again."""
    async with small_deployment(configuration, published=False) as fleet:
        workers = [fleet.environment("environment-0"), fleet.inference("inference-0")]
        for number, (kind, step) in enumerate((*kills, (StepTrained, STEPS)), 1):
            trainer, curriculum = CountingTrainer(), Curriculum(TASKS, TASKS, seed=1)
            learner = fleet.learner(f"learner-{number}", trainer=trainer, curriculum=curriculum)
            await until_stored(fleet, kind, f"l{number}", step)  # type: ignore[arg-type]
            if number <= len(kills) and drained:
                learner.drain.set()
                await learner.ended.wait()
            elif number <= len(kills):
                learner.kill()
        await learner.ended.wait()
        await fleet.drain_members(workers)
        return await read_recording(fleet)


async def read_recording(fleet: SmallDeployment) -> Recording:
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]
    return Recording(path=Path("in-memory"), header=RecordingHeader(run=RUN), entries=entries)


def in_virtual_time(work: Callable[[], Any]) -> Recording:
    with suppress_logs():
        clock = trio.testing.MockClock(autojump_threshold=0)
        recording: Recording = anyio.run(work, backend="trio", backend_options={"clock": clock})
    return recording


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Recording, Configuration]]:
    """Three lineages: the second goes on from the checkpoint of step 2, the third from that of step 4; without checkpoints
    (but for the last step) both begin again."""
    made: dict[int, tuple[Recording, Configuration]] = {}

    def make(checkpoint_every: int = 2) -> tuple[Recording, Configuration]:
        if checkpoint_every not in made:
            configuration = settings(tmp_path_factory.mktemp("run"), checkpoint_every)
            kills = {1: (), 2: ((StepTrained, 3), (CheckpointStored, 4)), 5: ((StepTrained, 2), (StepTrained, 1))}[
                checkpoint_every
            ]
            recording = in_virtual_time(partial(killed, configuration, kills))
            shutil.rmtree(configuration.run.folder)  # a recording is all that a replay has
            made[checkpoint_every] = (recording, configuration)
        recording, configuration = made[checkpoint_every]
        return msgspec.structs.replace(recording, entries=list(recording.entries)), configuration

    return make


def replayed(
    recording: Recording, configuration: Configuration, folder: Path, make: Callable[[], Any] | None = CountingTrainer
) -> Report:
    async def work() -> Report:
        options = Replay(role="learner", patience_seconds=PATIENCE_SECONDS)
        context = ReplayContext(recording, options, configuration=configuration)
        await replay_learner(context, (lambda configuration: make()) if make is not None else None, folder=folder)
        return context.report

    with suppress_logs():
        return anyio.run(work)


def begun(recording: Recording) -> list[tuple[str, int]]:
    entries = [entry for entry in recording.entries if ".train." in entry.subject]
    found = decode_entries(LineageStarted, entries, beside=STORED["train"])
    return [(started.lineage, started.parent_step) for _, started in found]


@pytest.mark.integration
@pytest.mark.parametrize("make", [CountingTrainer, None], ids=["until weights", "until batches"])
@pytest.mark.parametrize(("every", "starts"), [(2, [0, 2, 4]), (5, [0, 0, 0])], ids=["resumed", "begun again"])
def test_every_lineage_replays_as_recorded(
    every: int, starts: list[int], make: Callable[[], Any] | None, recorded: Any, tmp_path: Path
) -> None:
    recording, configuration = recorded(every)
    assert begun(recording) == [(f"l{number}", start) for number, start in enumerate(starts, 1)]
    steps = sum(b"StepTrained" in entry.payload for entry in recording.entries)
    report = replayed(recording, configuration, tmp_path, make)
    report.check()
    assert report.compared["LineageStarted"] == 6 and report.compared["TrainingFinished"] == 1
    assert report.compared["StepTrained"] == steps > STEPS
    assert report.notes["lineages that were replayed, each from where it began"] == 3


@pytest.mark.integration
@pytest.mark.parametrize("make", [CountingTrainer, None], ids=["until weights", "until batches"])
def test_a_learner_that_was_told_to_stop_ends_with_the_same_checkpoint(make: Callable[[], Any] | None, tmp_path: Path) -> None:
    configuration = settings(tmp_path / "recorded", 10)
    recording = in_virtual_time(partial(killed, configuration, ((StepTrained, 1), (StepTrained, 3)), drained=True))
    starts = [start for _, start in begun(recording)]
    assert starts[0] == 0 < starts[1] < starts[2] < STEPS
    report = replayed(recording, configuration, tmp_path / "replayed", make)
    report.check()
    assert report.compared["CheckpointStored"] == 3 and report.compared["StepTrained"] == STEPS
    assert not any("steps of lineage" in reason for reason in report.skipped)


@pytest.mark.integration
def test_each_lineage_replays_with_the_settings_that_it_was_started_with(tmp_path: Path) -> None:
    """The first evaluates two tasks before the first step; the second is resumed with another evaluation and batch, and those
    are the settings that the recording's header holds."""
    configuration = settings(tmp_path / "recorded", 2)
    evaluation = EvaluationSettings(episodes=3, every=1, greedy=False)
    learner = msgspec.structs.replace(configuration.learner, groups=3)
    resumed = msgspec.structs.replace(configuration, evaluation=evaluation, learner=learner)

    async def run() -> Recording:
        async with small_deployment(configuration, published=False) as fleet:
            workers = [fleet.environment("environment-0"), fleet.inference("inference-0")]
            for name, chosen in (("l1", configuration), ("l2", resumed)):
                curriculum = Curriculum(TASKS, TASKS, seed=1)
                last = fleet.learner(name, trainer=CountingTrainer(), curriculum=curriculum, configuration=chosen)
                if name == "l1":
                    await until_stored(fleet, CheckpointStored, "l1", 2)
                    last.kill()
            await last.ended.wait()
            await fleet.drain_members(workers)
            return await read_recording(fleet)

    recording = in_virtual_time(run)
    report = replayed(recording, resumed, tmp_path / "replayed")
    report.check()
    assert report.compared["EvaluationFinished"] > 3 and report.compared["TrainingFinished"] == 1
    assert begun(recording) == [("l1", 0), ("l2", 2)]
    assert not any("steps of lineage" in reason for reason in report.skipped)


def test_evaluations_of_an_operator_are_told_from_those_of_the_learner(tmp_path: Path) -> None:
    configuration = settings(tmp_path / "recorded", 2)
    tasks = [Task(key=f"other-{index}", prompt="play") for index in range(3)]

    async def run() -> Recording:
        async with small_deployment(configuration, published=False) as fleet:
            workers = [fleet.environment("environment-0"), fleet.inference("inference-0")]
            curriculum = Curriculum(TASKS, TASKS, seed=1)
            learner = fleet.learner("learner", trainer=CountingTrainer(), curriculum=curriculum)
            await learner.ended.wait()
            published = await find_newest_version(fleet.bus, fleet.subjects, "default")
            evaluate = partial(play, fleet.bus, configuration, tasks, name="eval-00c0ffee", samples=2)
            await evaluate(temperature=0.0, published=published, pinned=True)
            await fleet.drain_members(workers)
            return await read_recording(fleet)

    report = replayed(in_virtual_time(run), configuration, tmp_path / "replayed", None)
    report.check()
    assert report.notes["evaluation episodes that an operator asked for, which no learner repeats"] == 6


@pytest.mark.integration
def test_a_checkpoint_that_a_full_log_asked_for_is_counted_and_not_waited_for(recorded: Any, tmp_path: Path) -> None:
    recording, configuration = recorded(1)
    for index, entry in enumerate(recording.entries):
        if b"LineageStarted" in entry.payload:
            started = decode(LineageStarted, entry.payload)
            settings = started.settings | {"learner": started.settings["learner"] | {"checkpoint_every": 2}}
            payload = encode(msgspec.structs.replace(started, settings=settings))
            recording.entries[index] = msgspec.structs.replace(entry, payload=payload)
    report = replayed(recording, configuration, tmp_path)
    report.check()
    assert report.skipped["checkpoints that were stored because the log was full"] == 2
    assert report.compared["CheckpointStored"] == 3 and report.compared["StepTrained"] == STEPS


def test_a_change_in_a_later_lineage_is_found_and_the_lineages_after_it_are_named(recorded: Any, tmp_path: Path) -> None:
    class Forgetful(CountingTrainer):
        def restore(self, folder: Path) -> None:
            """It begins anew where it should go on."""

    report = replayed(*recorded(), tmp_path, Forgetful)  # type: ignore[call-arg]
    assert report.first is not None and report.first.message.startswith("PolicyPublished version")
    assert report.first.field == "manifest[0].sha256"
    assert "lineage l2, from step 2 on" in report.first.context
    assert report.compared["StepTrained"] == 3
    assert report.skipped["steps of lineage l3 (5): lineage l2 differs, and it stands on that"] == 1
    assert "  not replayed: 1 steps of lineage l3 (5): lineage l2 differs, and it stands on that" in report.lines()


def test_lineages_whose_checkpoint_was_not_recorded_are_named_with_their_steps(recorded: Any, tmp_path: Path) -> None:
    recording, configuration = recorded()
    recording.entries = [entry for entry in recording.entries if b"CheckpointStored" not in entry.payload]
    report = replayed(recording, configuration, tmp_path)
    report.check()
    left_out = "there is no checkpoint of step 2"
    assert report.skipped[f"steps of lineage l2 (3 to 4): {left_out}"] == 2
    assert report.skipped[f"steps of lineage l3 (5): {left_out}"] == 1
    assert report.compared["StepTrained"] == 3


@pytest.mark.integration
def test_a_learner_that_does_not_take_over_what_was_asked_for_before_is_found(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetbus_workers.learner.admission import Admission

    async def forget(admission: Admission, requests: Any, first_group: int = 0) -> None:
        return

    recording, configuration = recorded()
    monkeypatch.setattr(Admission, "take_over", forget)
    report = replayed(recording, configuration, tmp_path)
    assert report.first is not None and any("lineage l2" in line for line in report.first.context)


@pytest.mark.integration
def test_what_says_that_entries_left_the_log_keeps_no_recording_from_its_replay(recorded: Any, tmp_path: Path) -> None:
    recording, configuration = recorded()
    floor = StreamEntry(
        subject=Subjects(RUN).floor,
        payload=encode(FloorRaised(sequence=1)),
        sequence=recording.entries[-1].sequence + 1,
        time_ns=recording.entries[-1].time_ns,
    )
    recording.entries.append(floor)
    report = replayed(recording, configuration, tmp_path)
    assert report.same, report.lines()


@pytest.mark.integration
def test_a_checkpoint_that_a_kill_prevented_is_not_begun_from_in_the_replay(tmp_path: Path) -> None:
    """The replay of its lineage may have written it: it is not cut at the same instant."""
    configuration = settings(tmp_path / "run", checkpoint_every=1)
    recording = in_virtual_time(partial(killed, configuration, ((StepTrained, 1),)))
    assert begun(recording) == [("l1", 0), ("l2", 0)]
    made = policy_folder(configuration.run).checkpoints / "l2-000004"
    prevented = policy_folder(RunSettings(name=RUN, folder=str(tmp_path / "replay"))).checkpoints / "l1-000001"
    shutil.copytree(made, prevented)
    checkpoint = msgspec.json.decode((made / INDEX).read_bytes(), type=Checkpoint)
    index = msgspec.structs.replace(checkpoint, lineage="l1", step=1, version=1)
    (prevented / INDEX).write_bytes(msgspec.json.encode(index))
    report = replayed(recording, configuration, tmp_path / "replay")
    assert report.same, report.lines()
