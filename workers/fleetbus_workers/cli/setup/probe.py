"""``fleetbus probe``: tries to be paid by a grader without solving the task. 0: no finding; 1: findings; 2: bad input."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus.concurrency.blocked_loop import watch_blocked_loop
from fleetbus.errors import UserError
from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import NumberRange, load_settings
from fleetbus_workers.cli.output import build_table, json_option, print_json, print_table
from fleetbus_workers.cli.setup.check import end_if_blocked
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED
from fleetbus_workers.run_access.sources import is_recording, open_source

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.core.probe.findings import Example, ProbeReport
    from fleetbus_workers.probe.cases import Case
    from fleetbus_workers.probe.graders import ProbeGrader


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options."""

    source: str | None
    tasks: str | None
    verifier: str | None
    environment: str | None
    archive: Path | None
    count: int
    repeat: int
    seconds: float
    places: int


@click.command("probe")
@source_argument
@click.option("--tasks", metavar="FILE", help="Tasks to probe with, in the place of recorded episodes")
@click.option(
    "--verifier", metavar="FILE.py:FUNCTION|TASKS", help="The grader: a verifier, as for `regrade` [verifiers of --tasks]"
)
@click.option("--environment", metavar="SPEC", help="The grader: an environment that plays each answer, as for `check`")
@click.option("--recipe", metavar="NAME", help="Environment and tasks of a recipe")
@click.option("--cases", "count", type=click.IntRange(1, 10_000), default=24, show_default=True, help="Maximum number of tasks")
@click.option("--repeat", type=click.IntRange(2, 20), default=2, show_default=True, help="Times that each answer is graded")
@click.option("--seconds", type=NumberRange(0.1), default=10.0, show_default=True, help="Time limit of one verdict")
@click.option("--concurrency", type=click.IntRange(1, 256), default=8, show_default=True, help="Verdicts at a time")
@json_option("the report")
@archive_option()
@reach_options
def command(
    source: str | None,
    tasks: str | None,
    verifier: str | None,
    environment: str | None,
    recipe: str | None,
    count: int,
    repeat: int,
    seconds: float,
    concurrency: int,
    as_json: bool,
    archive: Path | None,
    **values: Any,
) -> int:
    """Try to be paid by a grader without solving the task, and see if right answers keep their reward in other dress.

    Says to each task what is wrong for certain (nothing, the prompt, every candidate, text that speaks to the grader, code that
    ends the tests, what was sampled), and what is right (docs/probe.md). The grader is --verifier, or --environment, which
    plays an episode for each answer. Right answers are `answer` or `oracle` in the config of tasks, or rewarded recorded ones.

    Exit status 0: no finding; 1: findings; 2: bad input.
    """
    from fleetbus.logs.setup import configure_logs

    tables = _read_recipe(recipe)
    given = {} if source is None or is_recording(source) else {"run__name": source}
    configuration = load_settings(
        {**values, **given}, earlier=recipe is None and source is not None, recipe=tables
    ).configuration
    if tables is not None:
        environment, tasks = environment or configuration.run.environment, tasks or configuration.run.tasks or None
    asked = _Asked(
        source=source, tasks=tasks, verifier=verifier, environment=environment, archive=archive, count=count, repeat=repeat,
        seconds=seconds, places=concurrency,
    )  # fmt: skip
    _check(asked)
    configure_logs(msgspec.structs.replace(configuration.log, level="error"), role="probe")
    with redirect_stdout(sys.stderr):  # an environment may print
        report = run_async(_probe, asked, configuration)
    print_json(msgspec.to_builtins(report)) if as_json else _print(report)
    return CRASHED if report.findings else FINISHED


def _read_recipe(name: str | None) -> dict[str, object] | None:
    if name is None:
        return None
    from fleetbus_workers.up.recipes import find_recipe

    return find_recipe(name).build_tables()


def _check(asked: _Asked) -> None:
    if asked.verifier and asked.environment:
        raise UserError("--verifier and --environment are two graders: give one of them")
    if asked.source and asked.tasks:
        raise UserError("recorded episodes and --tasks are two sources of cases: give one of them")
    if not asked.source and not asked.tasks and not asked.environment:
        raise UserError("nothing to probe: give a run, a recording, --tasks FILE or --recipe NAME")
    if asked.source and not asked.verifier and not asked.environment:
        raise UserError("no grader: give --verifier FILE.py:FUNCTION or --environment SPEC")


async def _probe(asked: _Asked, configuration: Configuration) -> ProbeReport:
    from fleetbus_workers.probe.probing import Prober

    success = configuration.evaluation.success_threshold
    cases = await _read_cases(asked, configuration, success)
    async with _open_grader(asked, configuration) as grader:
        return await Prober(grader, repeat=asked.repeat, places=asked.places, success=success).run(cases)


async def _read_cases(asked: _Asked, configuration: Configuration, success: float) -> list[Case]:
    from fleetbus.tasks.files import load_dataset
    from fleetbus_schemas import Task
    from fleetbus_workers.probe.cases import build_cases, collect_cases

    if asked.source is not None:
        async with open_source(asked.source, configuration, asked.archive) as opened:
            raw = asked.environment is not None
            return await collect_cases(opened.transcripts(), count=asked.count, success=success, raw=raw)
    if asked.tasks is not None:
        return build_cases(load_dataset(asked.tasks)[: asked.count])
    if asked.environment == "warehouse":
        from fleetbus_workers.environment.adapters.warehouse.tasks import build_solved_tasks

        return build_cases(build_solved_tasks(asked.count))
    return build_cases([Task(key="probe", seed=0)])


@asynccontextmanager
async def _open_grader(asked: _Asked, configuration: Configuration) -> AsyncIterator[ProbeGrader]:
    from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
    from fleetbus_workers.probe.graders import EnvironmentGrader, VerifierGrader

    seconds = min(asked.seconds, configuration.limits.verify)
    async with AsyncExitStack() as stack:
        if asked.environment is not None:
            from fleetbus_workers.assembly.environments import open_environments

            given = configuration.limits
            step, episode = min(seconds, given.step), min(seconds, given.episode)  # an environment may pace its steps itself
            limits = msgspec.structs.replace(given, verify=seconds, step=step, episode=episode)
            limited = msgspec.structs.replace(configuration, limits=limits)
            await stack.enter_async_context(watch_blocked_loop(end_if_blocked))
            opened = open_environments(
                limited, specs=asked.environment, sandbox=configuration.environment.sandbox, reuse_verifiers=True
            )
            yield EnvironmentGrader(await stack.enter_async_context(opened), limited)
            return
        from fleetbus_workers.replay.isolation_check import check_isolation
        from fleetbus_workers.replay.new_verifier import open_verifier

        code = open_verifier(asked.verifier or asked.tasks or "")
        await check_isolation(configuration)
        bounds = VerifierLimits(seconds=seconds, max_concurrent=asked.places)
        verifier = Verifier(bounds, sandbox=configuration.environment.sandbox, reuse_processes=True)
        await stack.enter_async_context(verifier.run())
        yield VerifierGrader(verifier, code)


def _print(report: ProbeReport) -> None:
    table = build_table("finding,of", right="cases,share,95 % interval,reward")
    for each in report.findings:
        interval = f"{each.share.low:.0%} to {each.share.high:.0%}"
        reward = "" if each.mean_reward is None else f"{each.mean_reward:.2f}"
        name = each.kind.replace("_", " ")
        table.add_row(name, each.what, f"{each.count} of {each.tried}", f"{each.share.value:.0%}", interval, reward)
    if report.findings:
        print_table(table)
    for kind in dict.fromkeys(each.kind for each in report.findings):
        shortest = min((each for each in report.findings if each.kind == kind), key=lambda each: len(each.example.said or ""))
        print(f"{kind.replace('_', ' ')}: {shortest.meaning}; for example")
        print(_describe(shortest.example))
    for note in report.notes:
        print(f"note: {note}")
    earned = "" if report.right_reward is None else f", right answers earn {report.right_reward:.3g} ({report.slot})"
    ending = f"{len(report.findings)} findings" if report.findings else "no finding"
    print(f"{report.cases:,} tasks, {report.gradings:,} answers graded{earned}: {ending}")


def _describe(example: Example) -> str:
    said = "no answer" if example.said is None else repr(example.said)
    rewards = ", ".join("none" if each is None else f"{each:g}" for each in example.rewards)
    reason = f" ({example.reason})" if example.reason else ""
    return f"  task {example.task}, reward {rewards}{reason}: {said}"
