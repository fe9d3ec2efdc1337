"""The part of the check that `up` runs first: one short episode of a class of the user's own, given up after a second."""

import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import anyio

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.base import TaskEnvironmentFactory
from fleetbus_workers.environment.check.episode import OF_LIMITS, OF_OTHERS, PlayedEpisode, play_episode
from fleetbus_workers.environment.check.policies import build_random_policy

QUICK_SECONDS = 1.0
"""What takes longer is neither waited for nor refused: the run itself names it."""

QUICK_TURNS = 3


def check_quickly(factory: Any, spec: str, task: Task, configuration: Configuration) -> None:
    """Play one episode of at most `QUICK_TURNS` turns in a thread of its own; raises `UserError` with the first failure."""
    found: list[PlayedEpisode] = []
    thread = threading.Thread(
        target=partial(_play, factory, task, configuration, found.append), name="environment-check", daemon=True
    )
    folder = os.getcwd()
    # What a class prints would stand between the lines of `up`; in the run its worker's log has it.
    with redirect_stdout(io.StringIO()):
        thread.start()
        thread.join(QUICK_SECONDS)
    os.chdir(folder)  # `up` and its workers go on where they were started, wherever the class went
    if not found:
        return
    for problem in found[0].problems:
        if problem.text.startswith((OF_OTHERS, OF_LIMITS)):  # the run would train the policy in its place
            print(f"fleetbus: warning: {problem.text}", file=sys.stderr)  # noqa: T201
    failure = next((problem for problem in found[0].problems if problem.is_failure), None)
    if failure is not None:
        where = f" ({failure.location})" if failure.location else ""
        raise UserError(
            f"environment {spec} fails its first episode, of task {task.key}: {failure.text}{where}: "
            f"`fleetbus check {spec}` with --tasks shows more, `up --no-check` trains all the same"
        )


def _play(factory: Any, task: Task, configuration: Configuration, done: Callable[[PlayedEpisode], None]) -> None:
    async def play() -> None:
        make = partial(factory.for_task, task) if isinstance(factory, TaskEnvironmentFactory) else factory
        async with factory.run():
            with anyio.move_on_after(QUICK_SECONDS):
                done(await play_episode(make, task, build_random_policy(1), configuration, turns=QUICK_TURNS))

    anyio.run(play)
