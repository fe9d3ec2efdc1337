"""An episode leaves an engine that is full for one that has room, and stays where it is otherwise."""

from __future__ import annotations

import anyio

from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus.delivery.heartbeats import LOST_AFTER_SECONDS
from fleetbus_schemas import Heartbeat, Subjects, Task
from fleetbus_workers.environment.episode.lane_status import MOST_WORKERS, LaneStatus
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


def beat(lane: str, in_flight: int, *, draining: bool = False) -> Heartbeat:
    return Heartbeat(role="inference", worker=f"w-{lane}", slots=4, in_flight=in_flight, lane=lane, draining=draining)


async def test_a_lane_is_crowded_only_while_it_is_full_and_another_is_not() -> None:
    routes = LaneStatus(None, Subjects("r"), lambda lane: None)  # type: ignore[arg-type]
    routes._apply_heartbeat(beat("i0", 4))
    assert not routes.is_full("i0")
    routes._apply_heartbeat(beat("i1", 3))
    assert routes.is_full("i0") and not routes.is_full("i1") and not routes.is_full("any")
    routes._apply_heartbeat(beat("i1", 3, draining=True))
    assert not routes.is_full("i0")
    routes._apply_heartbeat(beat("i1", 0))
    routes._apply_heartbeat(beat("i0", 3))
    assert not routes.is_full("i0")


async def test_a_worker_that_names_another_lane_with_each_heartbeat_is_remembered_with_the_newest_alone() -> None:
    drained: list[str] = []
    routes = LaneStatus(None, Subjects("r"), drained.append)  # type: ignore[arg-type]
    for lane in ("i0", "i1", "x" * 900_000, "", "a.b"):
        routes._apply_heartbeat(Heartbeat(role="inference", worker="w", slots=1, lane=lane, draining=True))
    assert drained == ["i0", "i1"], "a lane is a name"
    assert routes.is_usable("i0") and not routes.is_usable("i1")
    assert [list(routes._workers), list(routes._states)] == [["i1"], ["w"]]


async def test_a_lane_that_drains_is_usable_again_once_another_worker_has_it() -> None:
    routes = LaneStatus(None, Subjects("r"), lambda lane: None)  # type: ignore[arg-type]
    routes._apply_heartbeat(beat("i0", 0, draining=True))
    await anyio.sleep(3600)
    assert not routes.is_usable("i0"), "nobody else has it"
    routes._apply_heartbeat(Heartbeat(role="inference", worker="next", slots=4, lane="i0"))
    assert routes.is_usable("i0") and list(routes._states) == ["next"]


async def test_the_free_slots_of_a_worker_that_fell_silent_do_not_count() -> None:
    routes = LaneStatus(None, Subjects("r"), lambda lane: None)  # type: ignore[arg-type]
    routes._apply_heartbeat(beat("i1", 0))
    await anyio.sleep(LOST_AFTER_SECONDS)
    routes._apply_heartbeat(beat("i0", 4))
    assert routes.is_full("i0")
    await anyio.sleep(1)
    assert not routes.is_full("i0")


async def test_only_so_many_workers_are_remembered_however_many_there_were() -> None:
    routes = LaneStatus(None, Subjects("r"), lambda lane: None)  # type: ignore[arg-type]
    for number in range(MOST_WORKERS + 10):
        routes._apply_heartbeat(beat(f"i{number}", 4, draining=True))
    assert len(routes._states) == len(routes._workers) == MOST_WORKERS
    assert routes.is_usable("i9") and not routes.is_usable("i10")


async def test_the_turns_of_a_full_engine_spill_over_to_one_that_has_room() -> None:
    """One engine takes everything first; the second one joins, and the first one's episodes come over."""
    limits = LimitSettings(action=300, drain=10, late=60)
    configuration = build_configuration(limits=limits, environment=EnvironmentSettings(slots=8))
    with anyio.fail_after(4000):
        async with small_deployment(configuration) as fleet:
            await fleet.heard(fleet.environment("environment-0"))
            slow = ScriptedSampler(delay=lambda _: 5.0)
            await fleet.heard(fleet.inference("inference-0", sampler=slow, slots=4))
            for index in range(8):
                await fleet.request(f"e{index}", task=Task(key="task", prompt="play", config={"turns": 6}))
            await fleet.until(lambda: fleet.beats["inference-0"].in_flight == 4)
            await fleet.heard(fleet.inference("inference-1", sampler=ScriptedSampler(delay=lambda _: 5.0), slots=8))
            await fleet.all_results(8)
            actions = await fleet.actions()
    assert all(not results[0].error for results in fleet.results.values())
    by_episode: dict[str, list[str]] = {}
    for action in actions:
        by_episode.setdefault(action.episode_id, []).append(action.worker)
    moved = [workers for workers in by_episode.values() if {"inference-0", "inference-1"} == set(workers)]
    assert moved, "no episode that began with the full engine came over"
