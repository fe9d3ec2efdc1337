"""Held-out tasks played with the newest version of a run's policy: pass@k, per environment.

The run's own workers play them while it runs; of a run that is not running, a server and one worker of each kind are started
in this process for as long as it takes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from fleetbus.bus.base import Bus, CallBus
from fleetbus.config.seats import configure_seat, parse_seats
from fleetbus.config.settings import Configuration
from fleetbus.core.training.evaluation_summary import Summary as ResultSummary
from fleetbus.core.training.evaluation_summary import summarise_by_environment, summarise_results
from fleetbus.errors import UserError
from fleetbus_schemas import EpisodeFinished, MalformedMessage, PolicyPublished, Subjects, Task
from fleetbus_workers.assembly.engines import check_packages
from fleetbus_workers.assembly.work import Work, import_work
from fleetbus_workers.environment.adapters.foreign.benchmarks import Benchmark, BenchmarkFacts
from fleetbus_workers.run_access.log_access import open_run
from fleetbus_workers.run_access.server_address import generate_worker_name

HEARD_SECONDS = 5.0
"""Workers beat every two seconds; who is silent for this long is not there."""

ROLES = frozenset({"environment", "inference", "learner"})


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of an evaluation.

    ``version`` is the policy's newest version, after ``step`` training steps. ``pinned``: no other version answered. ``all``
    and each of ``environments`` (by environment key) have the counts, the mean reward and pass@k. ``missing`` episodes were
    not asked for, because no worker took them up in time. ``benchmark``: what was played, where it was one.
    """

    run: str
    policy: str
    version: int
    step: int
    pinned: bool
    temperature: float
    samples: int
    seconds: float
    all: ResultSummary
    environments: dict[str, ResultSummary]
    missing: int = 0
    benchmark: BenchmarkFacts | None = None


async def evaluate_run(
    configuration: Configuration,
    *,
    episodes: int | None = None,
    samples: int = 1,
    ks: Sequence[int] | None = None,
    temperature: float | None = None,
    on_progress: Callable[[int, int], None] = lambda done, count: None,
    environment_work: Work | None = None,
    benchmark: Benchmark | None = None,
) -> Evaluation:
    """Play ``samples`` episodes of each held-out task. ``ks``: the k of pass@k (1 and ``samples`` unless given);
    ``temperature`` None: the run's. ``environment_work``: what an environment worker does that is started here, unless the
    run's SPEC says it. ``benchmark``: its tasks instead, by a configuration that it fitted; the run must not be active. Raises
    `UserError`."""
    from fleetbus_workers.learner.held_out import find_newest_version, play

    temperature = configuration.episode.temperature if temperature is None else temperature
    tasks = select_tasks(configuration, episodes, benchmark)
    async with open_run(configuration, "operator", own_server=True) as bus:
        published = await find_newest_version(bus, Subjects(configuration.run.name), configuration.run.policy)
        live_roles = await find_live_roles(bus, configuration)
        if benchmark is not None and live_roles:
            raise UserError(f"run {configuration.run.name} is active, and its workers play its own tasks: stop it first")
        async with anyio.create_task_group() as group:
            drain = anyio.Event()
            start_missing_roles(group, bus, configuration, live_roles, drain, environment_work)
            started = anyio.current_time()
            results = await play(
                bus,
                configuration,
                tasks,
                name=f"eval-{secrets.token_hex(4)}",
                samples=samples,
                temperature=temperature,
                published=published,
                pinned="learner" not in live_roles,
                on_progress=on_progress,
            )
            seconds = anyio.current_time() - started
            drain.set()
    return summarise_evaluation(
        configuration,
        published,
        results,
        asked=len(tasks) * samples,
        samples=samples,
        ks=ks,
        temperature=temperature,
        seconds=seconds,
        pinned="learner" not in live_roles,
        benchmark=benchmark.facts if benchmark is not None else None,
    )


def select_tasks(configuration: Configuration, episodes: int | None, benchmark: Benchmark | None) -> list[Task]:
    """Those that an evaluation plays: held-out ones, or a benchmark's. Raises `UserError` if there are none."""
    from fleetbus_workers.assembly.learner_parts import build_curriculum

    if benchmark is not None:
        return benchmark.choose_tasks(episodes)
    tasks = build_curriculum(configuration).evaluation(episodes or configuration.evaluation.episodes)
    if not tasks:
        raise UserError("no tasks are held out: give more --episodes, or a tasks file with enough tasks")
    return tasks


def summarise_evaluation(
    configuration: Configuration,
    published: PolicyPublished,
    results: Sequence[EpisodeFinished],
    *,
    asked: int,
    samples: int,
    ks: Sequence[int] | None,
    temperature: float,
    seconds: float,
    pinned: bool = True,
    benchmark: BenchmarkFacts | None = None,
) -> Evaluation:
    """The findings in the results of ``asked`` episodes that ``published`` played."""
    threshold = configuration.evaluation.success_threshold
    chosen = list(ks) if ks is not None else sorted({1, samples})
    return Evaluation(
        run=configuration.run.name,
        policy=configuration.run.policy,
        version=published.version,
        step=published.step,
        pinned=pinned,
        temperature=temperature,
        samples=samples,
        seconds=round(seconds, 3),
        all=summarise_results(results, chosen, success_threshold=threshold),
        environments=summarise_by_environment(results, chosen, success_threshold=threshold),
        missing=asked - len(results),
        benchmark=benchmark,
    )


async def find_live_roles(bus: CallBus, configuration: Configuration) -> set[str]:
    """The kinds of `ROLES` that live; recorders and gateways neither play nor train."""
    from fleetbus.delivery.heartbeats import decode_heartbeat

    live_roles: set[str] = set()
    async with bus.listen(Subjects(configuration.run.name).heartbeats) as listener:
        with anyio.move_on_after(HEARD_SECONDS):
            while live_roles < ROLES:
                subject, payload = await listener.receive()
                with suppress(MalformedMessage):
                    live_roles |= ROLES & {decode_heartbeat(subject, payload).role}
    return live_roles


def start_missing_roles(
    group: TaskGroup,
    bus: Bus,
    configuration: Configuration,
    live_roles: set[str],
    drain: anyio.Event,
    environment_work: Work | None = None,
) -> None:
    """Workers for a run that has none; of one that has only some, the missing kind is named. Raises `UserError`."""
    missing = {"environment", "inference"} - live_roles
    if not missing:
        return
    if live_roles:
        kind = min(missing)
        raise UserError(f"no {kind} worker of run {configuration.run.name} responds: start one with `fleetbus {kind}`")
    try:
        check_packages(configuration.inference.engine)
    except UserError as error:
        raise UserError(f"{error}, or name another engine: --inference-engine torch") from None
    for role in ("environment", "inference"):
        work = environment_work if role == "environment" and environment_work else import_work(partial(_load_work, role))
        group.start_soon(work, bus, configuration, generate_worker_name(role), drain)
    for seat in parse_seats(configuration.run.seats):
        if not seat.is_served:
            raise UserError(
                f"no worker of the policy {seat.policy} responds, which plays the seat {seat.seat}: name a server or a model "
                f"for it (--seat {seat.seat}=...), or evaluate while the run's workers are there"
            )
        work = import_work(partial(_load_work, "inference"))
        group.start_soon(work, bus, configure_seat(configuration, seat), generate_worker_name("inference"), drain)


def _load_work(role: str) -> Any:
    if role == "environment":
        from fleetbus_workers.assembly.environment_work import work as environment_work

        return environment_work
    from fleetbus_workers.assembly.inference_work import work as inference_work

    return inference_work
