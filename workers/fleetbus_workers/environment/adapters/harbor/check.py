"""Checks Harbor tasks: their own solution gets the full reward, and doing nothing does not."""

from collections.abc import Sequence

import anyio
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.tasks.harbor import PREFIX
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.harbor.factory import HarborEnvironments
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict

FULL = 1.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of a task: those of its solution and of doing nothing (None: no verdict), and what is wrong with them."""

    key: str
    solution: float | None = None
    nothing: float | None = None
    problem: str = ""


def is_harbor(location: str) -> bool:
    """True if a location of tasks is one of Harbor tasks."""
    return location.startswith(PREFIX)


async def check_tasks(location: str, tasks: Sequence[Task], settings: Configuration, parallel: int) -> list[Finding]:
    """One finding for each task, in order. Raises `UserError` where no task can be played at all."""
    environments = HarborEnvironments(location, settings, prompt="compact", observation_bytes=32_768)
    limiter = anyio.CapacityLimiter(parallel)
    found: dict[str, Finding] = {}

    async def check(task: Task) -> None:
        async with limiter:
            found[task.key] = await _check_task(environments, task, settings.limits.verify)

    async with environments.run(), anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(check, task)
    return [found[task.key] for task in tasks]


async def _check_task(environments: HarborEnvironments, task: Task, seconds: float) -> Finding:
    try:
        solution = await _play(environments, task, seconds, solve=True)
        nothing = await _play(environments, task, seconds, solve=False)
    except (EnvironmentFailed, UserError) as error:
        return Finding(key=task.key, problem=str(error))
    problem = ""
    if solution.reward is None or solution.reward < FULL:
        problem = f"its solution does not get {FULL:g}: {solution.reason or f'the reward is {solution.reward}'}"
    elif nothing.reward is not None and nothing.reward >= FULL:
        problem = "doing nothing gets the full reward"
    return Finding(key=task.key, solution=solution.reward, nothing=nothing.reward, problem=problem)


async def _play(environments: HarborEnvironments, task: Task, seconds: float, *, solve: bool) -> Verdict:
    environment = environments()
    try:
        await environment.open(task)
        await environment.reset()
        return await (environment.solve(seconds) if solve else environment.do_nothing())
    finally:
        with anyio.CancelScope(shield=True):
            await environment.close()
