"""Pools of environment workers: which task goes where, which worker takes it, and what views say of each pool."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.bus.base import Delivery
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus.config.check import check_configuration
from fleetbus.config.load import load_configuration
from fleetbus.config.pools import find_pool, list_pools, list_served_pools, parse_pools
from fleetbus.config.settings import Configuration, EnvironmentSettings, RunSettings
from fleetbus.delivery.requests import Requests
from fleetbus.delivery.slots import Slots
from fleetbus.errors import UserError
from fleetbus.tasks.files import dump_tasks
from fleetbus_schemas import Subjects, Task
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.pools import MAX_POOLS, count_pools
from fleetbus_workers.observe.top.view import build_facts, screen
from fleetbus_workers.replay.recorded_choices import take_harmless_settings
from fleetbus_workers.up.checks import check_environment, select_served
from tests.support.scripted_run import SECOND, START, ScriptedRun
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time
S = Subjects("r")


def configured(pool: str = "default", served: str = "", slots: int = 8) -> Configuration:
    environment = EnvironmentSettings(pools=served, slots=slots)
    return Configuration(run=RunSettings(name="r", pool=pool), environment=environment)


# Settings


def test_a_key_has_its_pool_and_all_others_the_plain_one() -> None:
    pools = parse_pools("web=browser\n\n  cpu \nphone=browser")
    assert [find_pool(pools, key) for key in ("web", "phone", "shell", "")] == ["browser", "browser", "cpu", "cpu"]
    assert list_pools(RunSettings(pool="web=browser")) == ("default", "browser")


def test_a_worker_serves_all_pools_of_its_run_or_those_that_it_names() -> None:
    assert list_served_pools(configured("gpu=gpu")) == ("default", "gpu")
    assert list_served_pools(configured("default", " gpu, web,gpu ")) == ("gpu", "web")


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (configured("a=b\na=c"), "two pools for the key 'a'"),
        (configured("a\nb"), "two pools without a key"),
        (configured("a=not a name"), "run.pool 'not a name'"),
        (configured(served="a.b"), "environment.pools 'a.b'"),
        (configured("a=b\nc=d", slots=2), "environment.slots = 2 is fewer than the pools"),
    ],
)
def test_an_unclear_pool_is_one_line(configuration: Configuration, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        check_configuration(configuration)
    assert "\n" not in str(caught.value)


def test_pools_are_given_one_flag_each() -> None:
    flags = {"run.pool": ("cpu", "web=browser"), "environment.pools": "browser"}
    loaded = load_configuration(file=None, variables={}, flags=flags).configuration
    assert list_pools(loaded.run) == ("cpu", "browser")
    assert list_served_pools(loaded) == ("browser",)


def test_the_tasks_of_pools_that_others_serve_need_no_environment_here(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    dump_tasks([Task(key="1", env="web", prompt="a"), Task(key="2", env="shop", prompt="b")], file)
    here = configured("web=browser", "default")
    check_environment("shop=scripted", str(file), None, select_served(here))
    with pytest.raises(UserError, match="no environment for the key 'web'"):
        check_environment("shop=scripted", str(file), None, select_served(configured("web=browser")))


def test_a_recording_chooses_pools_and_nothing_beside_them() -> None:
    for pool, taken in (("cpu\nweb=browser", "cpu\nweb=browser"), ("web=$(reboot)", "default")):
        assert take_harmless_settings(configured(pool)).run.pool == taken


# Requests and workers


async def test_each_episode_is_requested_in_the_pool_of_its_task() -> None:
    configuration = configured("web=browser")
    async with MemoryServer().connect("r", worker="learner-0") as bus:
        await bus.declare(plan_run("r", pools=list_pools(configuration.run), lanes=1))
        requests = Requests(bus, S, configuration=configuration, worker="learner-0")
        for key in ("web", "shell"):
            task = Task(key=key, env=key)
            await requests.publish(
                requests.build_request(
                    task, episode_id=key, group_id="g", sample_index=0, group_size=1, split="train", lineage="", version=0
                )
            )
        assert sorted(await bus.list_subjects(S.tasks())) == [S.task("browser", "web"), S.task("default", "shell")]
        assert (await bus.log_state([tasks_consumer("browser"), tasks_consumer("default")])).unacked == 2


@pytest.mark.parametrize("filled", [("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize(("count", "ahead"), [(8, 2), (2, 1)])
async def test_a_worker_of_two_pools_holds_no_more_than_its_slots_and_shares_them_fairly(
    filled: tuple[str, ...], count: int, ahead: int
) -> None:
    most, ended = 0, Counter[str]()
    done = anyio.Event()

    async def work(delivery: Delivery) -> None:
        nonlocal most
        most = max(most, slots.in_flight)
        await anyio.sleep(1 + delivery.message.sequence / 100)
        await delivery.ack()
        ended[delivery.message.subject.split(".")[3]] += 1
        if ended.total() == 32:
            done.set()

    async with MemoryServer().connect("r", worker="environment-0") as bus:
        await bus.declare(plan_run("r", pools=("a", "b"), lanes=1))
        for number in range(40):
            for pool in filled:
                await bus.publish(S.task(pool, f"{pool}{number}"), b"")
        slots = Slots(bus, work, ahead=ahead)
        drain = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(slots.run, {tasks_consumer(pool): count for pool in ("a", "b")}, drain, group)
            with anyio.fail_after(100):
                await done.wait()
            group.cancel_scope.cancel()
    assert most <= count
    assert most >= count - ahead, "an idle pool keeps no more slots than it asks ahead"
    assert all(ended[pool] >= ended.total() / len(filled) / 2 for pool in filled), ended


# Views


def two_pools() -> ScriptedRun:
    run = ScriptedRun()
    run.begin()
    run.fleet(pools=("default",), in_flight=3)
    run.request(1, "e1", "e2")
    run.claim(2, "e1")
    run.request_in("gpu", 3, "e3", "e4", "e5")
    return run


def view_of(run: ScriptedRun, at: float) -> RunView:
    for beat in run.beats:
        run.state.worker_registry.record_heartbeat(beat, START + at)
    return RunView(run.state, now=START + at, now_ns=int((START + at) * SECOND))


def test_each_pool_has_its_episodes_and_its_workers() -> None:
    rows = {row.pool: row for row in view_of(two_pools(), 4).pools}
    assert (rows["default"].waiting, rows["default"].running, rows["gpu"].waiting) == (1, 1, 3)
    assert (rows["default"].slots, rows["default"].free, rows["default"].workers, rows["gpu"].workers) == (8, 5, 1, 0)


def test_top_and_metrics_show_what_waits_and_what_is_free_in_each_pool() -> None:
    from rich.console import Console

    view = view_of(two_pools(), 4)
    console = Console(width=80, record=True)
    console.print(screen(build_facts(view, run="r")))
    assert "pools: gpu 3 waiting, 0 of 0 slots free · default 1 waiting, 5 of 8 slots" in console.export_text()
    samples = {(each.name, each.labels): each.value for each in collect(view)}
    assert samples["fleetbus_pool_episodes", ("gpu", "waiting")] == 3
    assert samples["fleetbus_pool_slots", ("default", "free")] == 5
    assert samples["fleetbus_pool_workers", ("default",)] == 1


def test_a_pool_that_nobody_serves_is_said_though_the_other_one_goes_on() -> None:
    run = two_pools()
    run.finish(60, "e1", "e2")
    run.train(61, 1)
    stall = run.only(64)
    assert "3 episodes waiting in pool gpu, which no environment worker serves" in stall.reason
    assert "--environment-pools gpu" in stall.advice
    run.fleet(pools=("default", "gpu"))
    assert run.stalls(64) == []
    run.fleet()  # of an older version, which does not say what it serves
    assert run.stalls(64) == []


def test_whoever_names_pools_without_end_is_not_followed() -> None:
    run = ScriptedRun()
    run.fleet(pools=tuple(f"p{number}" for number in range(10 * MAX_POOLS)))
    view = view_of(run, 1)
    assert len(count_pools(view.state, view.workers)) == MAX_POOLS


def test_the_heartbeat_of_an_older_worker_names_no_pool() -> None:
    run = ScriptedRun()
    run.fleet()
    assert view_of(run, 1).pools == []
    assert all(not msgspec.structs.asdict(row)["pools"] for row in view_of(run, 1).workers)
