"""A run in which a learner of its own trains the policy of a seat: both are replayed, one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.config.settings import Configuration
from fleetbus.recording import Recording
from fleetbus_schemas import EpisodeFinished, StepTrained, decode, encode
from tests.replay.test_replay_of_lineages import CountingTrainer, in_virtual_time, read_recording, replayed, until_stored
from tests.support.small_deployment import small_deployment
from tests.system.test_two_learners import SOLVER, STEPS, configure, start_learner, start_workers

pytestmark = pytest.mark.integration


async def record(own: Configuration, other: Configuration, killed_at: int) -> Recording:
    """The learner that joined is killed at that step, if it is one, and started again."""
    async with small_deployment(own, published=False) as fleet:
        start_workers(fleet)
        asking = start_learner(fleet, "learner", own, CountingTrainer())
        joined = start_learner(fleet, "learner-solver", other, CountingTrainer())
        if killed_at:
            await until_stored(fleet, StepTrained, "l1", killed_at, policy=SOLVER)
            joined.kill()
            joined = start_learner(fleet, "learner-solver-2", other, CountingTrainer())
        for member in (asking, joined):
            await member.ended.wait()
        return await read_recording(fleet)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Recording, Configuration]]:
    made: dict[int, tuple[Recording, Configuration]] = {}

    def make(killed_at: int = 0) -> tuple[Recording, Configuration]:
        if killed_at not in made:
            own, other = configure(tmp_path_factory.mktemp("run"))
            made[killed_at] = (in_virtual_time(partial(record, own, other, killed_at)), own)
            shutil.rmtree(own.run.folder)  # a recording is all that a replay has
        recording, configuration = made[killed_at]
        return msgspec.structs.replace(recording, entries=list(recording.entries)), configuration

    return make


@pytest.mark.parametrize("make", [CountingTrainer, None], ids=["until weights", "until batches"])
@pytest.mark.parametrize("killed_at", [0, 3], ids=["undisturbed", "killed"])
def test_both_learners_replay_as_recorded(
    killed_at: int, make: Callable[[], Any] | None, recorded: Any, tmp_path: Path
) -> None:
    recording, configuration = recorded(killed_at)
    report = replayed(recording, configuration, tmp_path, make)
    assert report.same, report.lines()
    assert report.compared["StepTrained"] >= 2 * STEPS
    assert not report.skipped
    assert report.notes["learners, one after another"] == 2


def test_a_reward_of_the_other_policys_seat_that_is_another_is_found(recorded: Any, tmp_path: Path) -> None:
    recording, configuration = recorded()
    for place, entry in enumerate(recording.entries):
        if ".episode." in entry.subject and b"EpisodeFinished" in entry.payload:
            result = decode(EpisodeFinished, entry.payload)
            seats = tuple(msgspec.structs.replace(seat, reward=0.5) if seat.policy == SOLVER else seat for seat in result.seats)
            assert seats != result.seats
            changed = encode(msgspec.structs.replace(result, seats=seats))
            recording.entries[place] = msgspec.structs.replace(entry, payload=changed)
            break
    report = replayed(recording, configuration, tmp_path)
    assert [each.message for each in report.differences] == ["StepTrained step 1"], report.lines()
