"""`fleetbus up` with the real learner, environment and inference workers, without a model: a step takes a tenth of a second.

``python lossy_roles.py ARGUMENTS`` is the command `fleetbus ARGUMENTS`; ``... role ROLE NAME CONFIG`` is what `up` starts.
Every role ends as the real one does, with the same exit statuses and the same lines in its log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration
from fleetbus_schemas import Task

PACE_SECONDS = 0.05
"""Of one turn of the policy."""


def choose_command(configuration_file: Path) -> Callable[[str, str], Sequence[str]]:
    return lambda role, name: [sys.executable, __file__, "role", role, name, str(configuration_file)]


def run_command(arguments: list[str]) -> int:
    import fleetbus_workers.up.command
    from fleetbus_workers.cli.program import run_program

    setattr(fleetbus_workers.up.command, "build_role_command", choose_command)  # noqa: B010
    return run_program(arguments)


def role(role: str, name: str, configuration_file: str) -> int:
    from fleetbus_workers.cli.roles.role import run_role

    work = {"learner": learn, "environment": play, "inference": infer}[role]
    return run_role(role, lambda: work, {"config": Path(configuration_file), "name": name, "supervised": True})


async def learn(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
    from fleetbus_workers.learner.curriculum import Curriculum
    from fleetbus_workers.learner.scripted import ScriptedTrainer
    from fleetbus_workers.learner.worker import run_learner

    tasks = [Task(key=f"t{index}", prompt="p", config={"turns": 2}) for index in range(8)]
    curriculum = Curriculum(tasks, [], seed=configuration.run.seed)
    await run_learner(
        bus, configuration=configuration, name=name, drain=drain, trainer=ScriptedTrainer(), curriculum=curriculum
    )


async def play(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
    from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
    from fleetbus_workers.environment.worker import run_environment

    await run_environment(bus, configuration=configuration, name=name, drain=drain, make=ScriptedEnvironment)


async def infer(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
    from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
    from fleetbus_workers.inference.worker import run_inference

    sampler = ScriptedSampler(delay=lambda _: PACE_SECONDS)
    await run_inference(bus, configuration=configuration, name=name, drain=drain, sampler=sampler, template=ScriptedTemplate())


if __name__ == "__main__":
    sys.exit(role(*sys.argv[2:]) if sys.argv[1] == "role" else run_command(sys.argv[1:]))
