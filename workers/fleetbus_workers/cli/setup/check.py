"""``fleetbus check SPEC --tasks FILE``: an episode of an environment, played and checked. 0: good; 1: not; 2: bad input."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus.concurrency.blocked_loop import watch_blocked_loop
from fleetbus.errors import UserError
from fleetbus.tasks.files import load_dataset
from fleetbus.user_code import load_callable
from fleetbus_schemas import Task
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED
from fleetbus_workers.environment.check.policies import (
    NO_OPERATION,
    ORACLE,
    build_random_policy,
    build_scripted_policy,
    find_oracle,
)

if TYPE_CHECKING:
    from types import FrameType

    from fleetbus.config.settings import Configuration
    from fleetbus_schemas import Task
    from fleetbus_workers.environment.check.policies import Policy
    from fleetbus_workers.environment.check.report import CheckReport

BLOCKED_LIMIT_SECONDS = 15.0
"""A call that blocks the event loop for so long is given up with the whole process: nothing else can end it."""

SHOWN_CHARS = 2000


@click.command("check")
@click.argument("spec", metavar="SPEC")
@click.option("--tasks", "location", metavar="FILE", help="Tasks file; the first task is played unless --task names another")
@click.option("--task", "key", metavar="KEY", help="Play the task of this key")
@click.option(
    "--policy",
    default="random",
    metavar="NAME",
    show_default=True,
    help="random, no-op, oracle (the task's config has `oracle`: a text or a list of texts), or MODULE:FUNCTION of your own, "
    "called with all messages and the tools",
)
@click.option("--action", "actions", multiple=True, metavar="TEXT", help="Say this instead; repeat it for each turn")
@click.option("--turns", type=click.IntRange(1), metavar="N", help="Maximum number of turns (default: that of a run)")
@click.option("--seed", type=int, default=1, metavar="N", help="Of the random policy [1]")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file with settings")
@json_option("everything")
def command(
    spec: str,
    location: str | None,
    key: str | None,
    policy: str,
    actions: tuple[str, ...],
    turns: int | None,
    seed: int,
    as_json: bool,
    **values: Any,
) -> int:
    """Play an episode of an environment in this process and check everything it returns. SPEC as for `up --environment`.

    Checks types, roles, rewards, tool schemas, times, whether the event loop was blocked, whether the same actions lead to the
    same observations, what the task's oracle gets, and what doing nothing gets. Needs no server and no model.

    Exit status 0: no failure (there may be warnings); 1: an episode would not be trained, with FILE:LINE; 2: bad input, or a
    server that does not answer.
    """
    from fleetbus.logs.setup import configure_logs

    configuration = load_settings({**values, "run__environment": (spec,)}, earlier=False).configuration
    configure_logs(configuration.log, role="check")
    task = _choose_task(location, key)
    chosen = _build_policy(policy, actions, task, seed)
    report = run_async(_check, configuration, spec, task, chosen, turns or configuration.episode.max_turns)
    if report.episode.unopened:
        raise UserError(
            f"environment {spec} does not open: {report.episode.unopened}: check its address and key, and that its server runs"
        )
    facts = {"passed": not report.has_failed} | msgspec.to_builtins(report)
    print_json(facts) if as_json else _print(report)
    return CRASHED if report.has_failed else FINISHED


def _choose_task(location: str | None, key: str | None) -> Task:
    if location is None:
        if key is not None:
            raise UserError("--task names a task of a file: give --tasks, too")
        return Task(key="check", seed=0)
    tasks = load_dataset(location)
    found = next((task for task in tasks if key in (None, task.key)), None)
    if found is None:
        raise UserError(f"{location}: no task has the key {key!r}; the first is {tasks[0].key!r}")
    return found


def _build_policy(name: str, actions: tuple[str, ...], task: Task, seed: int) -> Policy:
    if actions:
        return build_scripted_policy(actions)
    if name == "random":
        return build_random_policy(seed)
    if name == NO_OPERATION:
        return build_scripted_policy([])
    if name == ORACLE:
        texts = find_oracle(task)
        if texts is None:
            raise UserError(f"task {task.key} has no oracle: put the actions that solve it into its config as `oracle`")
        return build_scripted_policy(texts)
    if ":" in name:
        return load_callable(f"--policy {name}", name)
    raise UserError(f"--policy {name}: choose random, {NO_OPERATION}, {ORACLE} or MODULE:FUNCTION")


async def _check(configuration: Configuration, spec: str, task: Task, policy: Policy, turns: int) -> CheckReport:
    from fleetbus_workers.assembly.environments import open_environments
    from fleetbus_workers.environment.check.report import check_task

    async with watch_blocked_loop(end_if_blocked), open_environments(configuration, specs=spec) as factory:
        return await check_task(factory, task, policy, configuration, turns=turns)


def end_if_blocked(frame: FrameType | None, seconds: float) -> None:
    """End the process if a call of an environment blocks it for too long."""
    from fleetbus_workers.environment.failure_location import locate_frame

    where = locate_frame(frame)
    if seconds < BLOCKED_LIMIT_SECONDS or where.endswith("in <module>"):  # imports take their time on a busy machine
        return
    advice = "use anyio.sleep, or anyio.to_thread.run_sync"
    print(f"FAILED  the event loop is blocked at {where or 'an unknown place'}: {advice}", file=sys.stderr, flush=True)
    os._exit(CRASHED)


def _print(report: CheckReport) -> None:
    _print_episode(report)
    for problem in report.problems:
        where = f" ({problem.location})" if problem.location else ""
        print(f"{'FAILED' if problem.is_failure else 'warning'}  {problem.text}{where}")
        if problem.traceback:
            print("\n".join(f"  | {line}" for line in problem.traceback.splitlines()))
    if not report.has_failed:
        print(f"ok  task {report.task}{f', {len(report.problems)} warnings' if report.problems else ''}")


def _print_episode(report: CheckReport) -> None:
    episode = report.episode
    if episode.tools:
        print(f"tools: {', '.join(tool.name for tool in episode.tools)}")
    for turn, exchange in enumerate(episode.exchanges):
        print(f"── turn {turn} {f'· {exchange.seat} ' if exchange.seat else ''}" + "─" * 50)
        for message in exchange.messages:
            print(f"[{message.role}] {_read_text(message)}")
        reward = f"   (reward {exchange.reward:g})" if exchange.reward else ""
        print(f"[assistant] {exchange.said}{reward}")
    for message in episode.last:
        print(f"[{message.role}] {_read_text(message)}")
    if episode.verdict is not None:
        reward = "none" if episode.verdict.reward is None else f"{episode.verdict.reward:g}"
        print(f"── {episode.ending} · reward {reward}{f' ({episode.verdict.reason})' if episode.verdict.reason else ''}")
    times = ", ".join(f"{stage} {seconds * 1000:.1f} ms" for stage, seconds in episode.seconds.items())
    print(f"times: {times}; longest step {episode.longest_step * 1000:.1f} ms")
    if not report.has_failed:
        oracle = "none in the task" if report.oracle is None else f"{report.oracle:g}"
        idle = "no verdict" if report.idle is None else f"{report.idle:g}"
        print(f"replayable: {'yes' if report.replayable else 'no'}; reward of the oracle: {oracle}; of doing nothing: {idle}")


def _read_text(message: Any) -> str:
    content = message.content
    text = content if isinstance(content, str) else " ".join(getattr(part, "text", "[image]") for part in content)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} [{len(text) - SHOWN_CHARS} characters left out]"
