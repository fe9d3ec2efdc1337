"""A run in which a learner of its own trains the policy of a seat: the learner that asks for the episodes replays alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fleetbus.config.settings import Configuration
from fleetbus.recording import Recording
from tests.replay.test_replay_of_lineages import CountingTrainer, in_virtual_time, read_recording, replayed
from tests.support.small_deployment import small_deployment
from tests.system.test_two_learners import Noting, configure, start_learner, start_workers

pytestmark = pytest.mark.integration


async def record(own: Configuration, other: Configuration) -> Recording:
    async with small_deployment(own, published=False) as fleet:
        start_workers(fleet)
        members = [
            start_learner(fleet, "learner", own, CountingTrainer()),
            start_learner(fleet, "learner-solver", other, Noting()),
        ]
        for member in members:
            await member.ended.wait()
        return await read_recording(fleet)


def test_the_learner_that_asks_replays_without_the_one_that_joined(tmp_path: Path) -> None:
    own, other = configure(tmp_path / "run")
    recording = in_virtual_time(partial(record, own, other))
    report = replayed(recording, own, tmp_path / "replay")
    assert not report.differences
    assert report.skipped["learner of the policy solver, which asks for no episodes"] == 1
