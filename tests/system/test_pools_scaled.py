"""The figures that a scaler reads of each pool: its consumer's lag, as KEDA computes it from the server, and the metrics."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from fleetbus.auth.server_config import account_of
from fleetbus.bus.base import Bus
from fleetbus.bus.streams import log_stream, plan_run, tasks_consumer
from fleetbus_schemas import EpisodeRequested, Subjects, Task, encode
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.jetstream import ServerView
from fleetbus_workers.observe.run.run_observer import LogHealth, RunObserver
from fleetbus_workers.observe.run.state import RunState
from tests.support.servers import RunningServers, running_servers

RUN = "scaled"
S = Subjects(RUN)
SLOTS = 64
WAITING = {"default": 10, "browser": 130}


async def request(bus: Bus, pool: str, number: int) -> None:
    episode = f"{pool}-{number}"
    message = EpisodeRequested(
        episode_id=episode, group_id=episode, sample_index=0, split="eval", task=Task(key="t"), policy="default", max_turns=1,
        max_tokens=64, deadline_ns=bus.now_ns() + 60 * 10**9,
    )  # fmt: skip
    await bus.publish(S.task(pool, episode), encode(message), expected_last=0)


def read_lag(monitor: str, consumer: str) -> int:
    """As KEDA's scaler for JetStream: what waits and what was taken and is not acked."""
    with urllib.request.urlopen(f"{monitor}/jsz?acc={account_of(RUN)}&consumers=true&config=true", timeout=5) as answer:
        told: dict[str, Any] = json.load(answer)
    streams = [each for account in told["account_details"] for each in account["stream_detail"]]
    (log,) = (each for each in streams if each["name"] == log_stream(RUN))
    (found,) = (each for each in log["consumer_detail"] if each["name"] == consumer)
    return int(found["num_pending"] + found["num_ack_pending"])


async def read_metrics(bus: Bus) -> dict[str, float]:
    """Episodes that wait, by pool."""
    async with anyio.create_task_group() as tasks:
        watch = RunObserver(bus, S, RunState(0))
        tasks.start_soon(watch.run)
        while watch.state.requested < sum(WAITING.values()):  # noqa: ASYNC110  # another task reads them
            await anyio.sleep(0.05)
        samples = collect(RunView(watch.state, LogHealth(), ServerView(), [], now=anyio.current_time(), now_ns=bus.now_ns()))
        tasks.cancel_scope.cancel()
    pools = {sample.labels: sample.value for sample in samples if sample.name == "fleetbus_pool_episodes"}
    return {pool: value for (pool, state), value in pools.items() if state == "waiting"}


def names_on_server(servers: RunningServers) -> dict[str, str]:
    """As `fleetbus init --json` prints them."""
    plan = plan_run(RUN, pools=tuple(WAITING), lanes=2)
    return servers.auth.names(plan) if servers.auth is not None else {each.name: each.name for each in plan.consumers}


@pytest.mark.timeout(120)
async def test_a_scaler_reads_of_each_pool_what_waits_and_what_is_played_there(tmp_path: Path) -> None:
    plan = plan_run(RUN, pools=tuple(WAITING), lanes=2, max_bytes=1 << 28)
    async with running_servers(tmp_path, [plan], form="keyed") as servers:
        await servers.declare(plan)
        names, monitor = names_on_server(servers), servers.processes[0].monitor_url
        assert monitor is not None
        async with servers.connect(RUN, "learner-0") as bus:
            for pool, count in WAITING.items():
                for number in range(count):
                    await request(bus, pool, number)

            async def lags() -> dict[str, int]:
                read = anyio.to_thread.run_sync
                return {pool: await read(read_lag, monitor, names[tasks_consumer(pool)]) for pool in WAITING}

            assert await lags() == WAITING
            async with servers.connect(RUN, "monitor-0") as monitoring:
                assert await read_metrics(monitoring) == WAITING
            async with servers.connect(RUN, "environment-0") as worker:
                async with worker.pull(tasks_consumer("browser"), credits=SLOTS) as taken:
                    deliveries = [await taken.receive() for _ in range(SLOTS)]
                    assert await lags() == WAITING, "an episode that is played needs its worker still"
                    for delivery in deliveries:
                        await delivery.ack()
                    with anyio.fail_after(10):
                        while await lags() != WAITING | {"browser": WAITING["browser"] - SLOTS}:  # noqa: ASYNC110  # the server's
                            await anyio.sleep(0.05)
