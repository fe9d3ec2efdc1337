"""``fleetbus evaluate RUN``: held-out tasks played with the newest version of the policy; pass@k, per environment."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import click

from fleetbus.errors import UserError
from fleetbus_workers.cli.log_access import open_run, reach_options, run_argument
from fleetbus_workers.cli.options import NumberRange, load_settings

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration
    from fleetbus.core.evaluation_summary import Summary

HEARD_SECONDS = 5.0
"""Workers beat every two seconds; who is silent for this long is not there."""

ROLES = frozenset({"environment", "inference", "learner"})

Report = dict[str, Any]


@click.command("evaluate")
@run_argument
@click.option("--tasks", "run__tasks", metavar="FILE", help="Tasks file; its held-out tasks are played (default: the run's)")
@click.option("--episodes", type=click.IntRange(1), metavar="N", help="Held-out tasks to play (default: the run's setting)")
@click.option("--samples", type=click.IntRange(1), default=1, metavar="N", help="Episodes per task [1]")
@click.option("--k", "ks", default="", metavar="K,K", help="The k of pass@k [1 and the number of samples]")
@click.option("--temperature", type=NumberRange(0), metavar="NUMBER", help="Sampling temperature; 0: greedy [the run's]")
@click.option(
    "--inference-engine", "inference__engine", metavar="NAME", help="Engine of the worker that is started here [the run's]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON")
@reach_options
def command(
    run: str | None,
    episodes: int | None,
    samples: int,
    ks: str,
    temperature: float | None,
    as_json: bool,
    **values: Any,
) -> int:
    """Play held-out tasks with the newest version of a run's policy.

    The run's own workers play them while it runs; of a run that nobody serves, a server and one worker of each kind are started
    here for as long as it takes. The episodes are never trained on. While a learner publishes new versions none can be pinned,
    and the report names those that answered.
    """
    configuration = load_settings({**values, "run__name": run}).configuration
    chosen = _parse_ks(ks, samples)
    wished = configuration.episode.temperature if temperature is None else temperature
    play = partial(_evaluate, configuration, episodes or configuration.evaluation.episodes, samples, chosen, wished, as_json)
    report: Report = anyio.run(play, backend_options={"use_uvloop": os.name != "nt"})
    _print_json(report) if as_json else _print(report)
    return 0


def _parse_ks(text: str, samples: int) -> list[int]:
    if not text:
        return sorted({1, samples})
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= samples for part in parts):
        raise UserError(f"--k {text}: it takes whole numbers from 1 to --samples {samples}, separated by commas")
    return sorted({int(part) for part in parts})


async def _evaluate(
    configuration: Configuration, episodes: int, samples: int, ks: list[int], temperature: float, quiet: bool
) -> Report:
    from fleetbus.core.evaluation_summary import summarise_by_environment, summarise_results
    from fleetbus_schemas import Subjects
    from fleetbus_workers.cli.learner import _build_curriculum
    from fleetbus_workers.learner.held_out import find_newest_version, play

    tasks = _build_curriculum(configuration).evaluation(episodes)
    if not tasks:
        raise UserError("no tasks are held out: give more --episodes, or a tasks file with enough tasks")
    async with open_run(configuration, "operator", own_server=True) as bus:
        published = await find_newest_version(bus, Subjects(configuration.run.name), configuration.run.policy)
        live_roles = await _find_live_roles(bus, configuration)
        async with anyio.create_task_group() as group:
            drain = anyio.Event()
            _start_missing(group, bus, configuration, live_roles, drain)
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
                on_progress=_ignore_progress if quiet or not sys.stderr.isatty() else _print_progress,
            )
            seconds = anyio.current_time() - started
            drain.set()
    if unplayed := len(tasks) * samples - len(results):
        told = f"{unplayed} of {len(tasks) * samples} episodes were not asked for"
        print(f"{told}: no worker claimed the rest within limits.episode; start more environment workers", file=sys.stderr)
    return {
        "run": configuration.run.name,
        "policy": configuration.run.policy,
        "version": published.version,
        "step": published.step,
        "pinned": "learner" not in live_roles,
        "temperature": temperature,
        "samples": samples,
        "seconds": round(seconds, 3),
        "all": summarise_results(results, ks),
        "environments": summarise_by_environment(results, ks),
    }


async def _find_live_roles(bus: Bus, configuration: Configuration) -> set[str]:
    """Which kinds of `ROLES` live; recorders and gateways neither play nor train."""
    from fleetbus_schemas import Heartbeat, MalformedMessage, Subjects, decode

    live_roles: set[str] = set()
    async with bus.listen(Subjects(configuration.run.name).heartbeats) as listener:
        with anyio.move_on_after(HEARD_SECONDS):
            while live_roles < ROLES:
                subject, payload = await listener.receive()
                with suppress(MalformedMessage):
                    live_roles |= ROLES & {decode(Heartbeat, payload, subject=subject).role}
    return live_roles


def _start_missing(group: Any, bus: Bus, configuration: Configuration, live_roles: set[str], drain: anyio.Event) -> None:
    """Workers for a run that has none; of one that has only some, the missing kind is named."""
    from fleetbus.logs import configure_logs
    from fleetbus_workers.assembly.engines import check_packages
    from fleetbus_workers.cli.environment import _load_work as environment_work
    from fleetbus_workers.cli.inference import _load_work as inference_work
    from fleetbus_workers.cli.role import _import_work, generate_worker_name

    missing = {"environment", "inference"} - live_roles
    if not missing:
        return
    if live_roles:
        kind = min(missing)
        raise UserError(f"no {kind} worker of run {configuration.run.name} is heard: start one with `fleetbus {kind}`")
    try:
        check_packages(configuration.inference.engine)
    except UserError as error:
        raise UserError(f"{error}, or name another engine: --inference-engine torch") from None
    configure_logs(configuration.log, run=configuration.run.name, role="evaluate", worker="evaluate")
    for role, load in (("environment", environment_work), ("inference", inference_work)):
        group.start_soon(_import_work(load), bus, configuration, generate_worker_name(role), drain)


def _print_progress(done: int, count: int) -> None:
    print(f"\r{done} of {count} episodes", end="" if done < count else "\n", file=sys.stderr, flush=True)


def _ignore_progress(done: int, count: int) -> None:
    """Discard progress."""


def _print_json(report: Report) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


def _print(report: Report) -> None:
    everything: Summary = report["all"]
    versions = ", ".join(map(str, everything.versions)) or "-"
    pinned = "" if report["pinned"] else f"; answered by {versions} while training went on"
    print(f"run {report['run']}, version {report['version']} after {report['step']} steps{pinned}")
    shown = {"all": everything} | {name or "-": summary for name, summary in report["environments"].items()}
    for name, summary in shown.items() if len(shown) > 2 else (("all", everything),):
        passed = "  ".join(f"pass@{k} {value:.3f}" for k, value in summary.pass_at.items())
        others = "  ".join(f"{count} {outcome}" for outcome, count in summary.not_graded.items())
        print(
            f"  {name:<24} {summary.graded} of {summary.episodes} graded  reward {summary.mean_reward:.3f}  {passed}  {others}"
        )
