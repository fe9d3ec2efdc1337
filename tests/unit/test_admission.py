"""Admission of groups: as many as staleness allows, and only once the version exists that they are to begin with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
from anyio import wait_all_tasks_blocked

from fleetbus.config.settings import LearnerSettings
from fleetbus.core.training.ledger import Ledger
from fleetbus.delivery.requests import Requests, StoredRequest
from fleetbus_schemas import ActionReference, EpisodeFinished, EpisodeRequested, Task
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.pool import GroupPool


class RecordedRequests(Requests):
    """Takes requests without a bus."""

    def __init__(self) -> None:
        self.asked: list[EpisodeRequested] = []
        self.room: float = math.inf
        self.delay_ns = 0

    async def wait_for_room(self, episodes: int = 1) -> None:
        if len(self.asked) >= self.room:
            await anyio.sleep_forever()

    def build_request(self, task: Task, **fields: Any) -> EpisodeRequested:
        assert not fields.pop("opponents"), "no seat is of a league"
        version = fields.pop("version")
        return EpisodeRequested(task=task, policy="default", policy_version=version, deadline_ns=1, **fields)

    async def publish(self, request: EpisodeRequested) -> StoredRequest:
        self.asked.append(request)
        made_again = msgspec.structs.replace(request, deadline_ns=request.deadline_ns + self.delay_ns)
        return StoredRequest(request=made_again, sequence=len(self.asked))


def build_admission(
    requests: Requests, pool: GroupPool, settings: LearnerSettings, progress: Sequence[int] = (0, 0)
) -> Admission:
    """``progress``: the step and the version of the learner, read whenever admission asks."""
    return Admission(
        requests,
        pool,
        Curriculum([Task(key="t")], [], seed=1),
        settings=settings,
        lineage="l1",
        next_group=0,
        progress=lambda: (progress[0], progress[1]),
    )


def completed(request: EpisodeRequested, sequence: int) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id=request.episode_id,
        group_id=request.group_id,
        attempt=1,
        outcome="completed",
        worker="w",
        reward=1.0,
        request_sequence=sequence,
        actions=(ActionReference(sequence=1, lane="e0", turn=0),),
        policy_versions=(0,),
    )


async def test_groups_are_asked_for_again_only_when_the_version_of_the_step_is_published() -> None:
    settings = LearnerSettings(groups=2, group_size=2, max_staleness=1, steps=10)
    pool = GroupPool(Ledger(), minimum=2, max_staleness=1, stale_groups="drop")
    requests, progress = RecordedRequests(), [0, 0]
    admission = build_admission(requests, pool, settings, progress)
    pool.record_version(0, 0)
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admission.run, anyio.Event())
            await wait_all_tasks_blocked()
            assert len(requests.asked) == 8
            for sequence, request in enumerate(requests.asked, start=1):
                pool.add_result(completed(request, sequence), 8 + sequence)
            progress[0] = 1
            pool.settle(pool.take(2, 0))
            await wait_all_tasks_blocked()
            assert len(requests.asked) == 8, "nothing begins with the weights of the step before"
            progress[1] = 1
            pool.record_version(1, 1)
            await wait_all_tasks_blocked()
            assert [request.policy_version for request in requests.asked[8:]] == [1] * 4
            tasks.cancel_scope.cancel()


async def test_every_group_waits_for_room_of_its_own() -> None:
    """A round may be large, and others fill the log meanwhile."""
    pool = GroupPool(Ledger(), minimum=2, max_staleness=1, stale_groups="drop")
    requests = RecordedRequests()
    requests.room = 4
    admission = build_admission(requests, pool, LearnerSettings(groups=4, group_size=2, max_staleness=1, steps=10))
    pool.record_version(0, 0)
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admission.run, anyio.Event())
            await wait_all_tasks_blocked()
            assert len(requests.asked) == 4
            tasks.cancel_scope.cancel()


async def test_an_episode_is_named_by_the_deadline_with_which_its_request_was_stored() -> None:
    """Records of a batch lead to its trace by that, and to none by the one with which it found no room."""
    settings = LearnerSettings(groups=1, group_size=2, max_staleness=0, steps=1)
    pool = GroupPool(Ledger(), minimum=2, max_staleness=1, stale_groups="drop")
    pool.record_version(0, 0)
    requests = RecordedRequests()
    requests.delay_ns = 60
    admission = build_admission(requests, pool, settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(admission.run, anyio.Event())
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    for sequence, request in enumerate(requests.asked, start=1):
        pool.add_result(completed(request, sequence), 10 + sequence)
    (group,) = pool.take(1, 0)
    assert group.deadlines_ns == {"g000000-0": 61, "g000000-1": 61}
