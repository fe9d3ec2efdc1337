"""A league: the versions that the log and an archive keep for it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.training.retention import KEPT_CHECKPOINTS, KEPT_VERSIONS, MOST_KEPT_VERSIONS, Retention
from fleetbus.errors import UserError
from fleetbus_schemas import CheckpointStored, FloorRaised, PolicyPublished, Subjects, encode
from fleetbus_workers.learner.baselines import find_or_name_baseline


def enter_versions(retention: Retention, count: int, window: int) -> None:
    published = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
    for number in range(count):
        retention.enter(number + 1, "fb.game.policy.default", replace(published, version=number, window=window))


@pytest.mark.parametrize(("window", "kept"), [(0, KEPT_VERSIONS), (5, KEPT_VERSIONS), (40, 40), (10**9, MOST_KEPT_VERSIONS)])
def test_the_log_keeps_the_versions_that_requests_may_name_and_no_more(window: int, kept: int) -> None:
    """A month of steps has forty thousand, each with the manifest of a whole model."""
    retention = Retention()
    enter_versions(retention, 1000, window)
    assert retention.find_first_needed("policy", "default", 2000) == 1001 - kept


@pytest.mark.parametrize(("window", "kept"), [(0, KEPT_VERSIONS), (40, 40)])
def test_an_archive_keeps_them_for_a_log_that_is_restored(window: int, kept: int) -> None:
    retention = Retention()
    enter_versions(retention, 1000, window)
    for number in range(KEPT_CHECKPOINTS):
        stored = CheckpointStored(lineage="l1", step=number, version=999, file="", floor=1500)
        retention.enter(1500 + number, "fb.game.train.default", stored)
    retention.enter(1600, "fb.game.floor", FloorRaised(sequence=1500, groups={"default": 9}))
    assert retention.find_archive_floor() == 1001 - kept


def test_the_first_version_stays_in_the_log() -> None:
    """On the subject of the league's own policy, which has no other."""
    retention = Retention()
    enter_versions(retention, 1000, 9)
    first = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
    retention.enter(2, "fb.game.policy.second", first)
    assert retention.find_first_needed("policy", "second", 2000) == 0
    assert ("policy", "second") in retention.list_names()


async def test_a_league_begins_with_the_first_entry_and_refuses_the_name_of_another_policy() -> None:
    server, subjects = MemoryServer(), Subjects("run")
    server.declare(plan_run("run", lanes=2))
    first = PolicyPublished(policy="default", version=3, lineage="l1", step=3, uri="", manifest=(), size_bytes=0)
    async with server.connect("run") as bus:
        assert await find_or_name_baseline(bus, subjects.policy("second"), first) == first
        await bus.publish(subjects.policy("second"), encode(replace(first, version=4)))
        assert await find_or_name_baseline(bus, subjects.policy("second"), replace(first, version=9)) == first
        await bus.publish(subjects.policy("solver"), encode(replace(first, policy="solver")))
        with pytest.raises(UserError, match="solver holds no version of default, but something else"):
            await find_or_name_baseline(bus, subjects.policy("solver"), first)
        await bus.publish(subjects.policy("solver"), encode(first))
        assert await find_or_name_baseline(bus, subjects.policy("solver"), first) == first
