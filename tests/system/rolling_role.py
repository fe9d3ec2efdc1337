"""One role of a run without a model, as a process of whichever version of fleetbus its PYTHONPATH names.

``python rolling_role.py ROLE NAME [ARGUMENT ...]``, its settings in variables; ``init`` declares the run. It calls only what
both versions of a rolling upgrade have: a change of these calls is a change of this file, once, for both.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio

PACE_SECONDS = 0.05
"""Of one turn of the policy."""


async def learn(bus: Any, configuration: Any, name: str, drain: anyio.Event) -> None:
    from fleetbus_schemas import Task
    from fleetbus_workers.learner.curriculum import Curriculum
    from fleetbus_workers.learner.scripted import ScriptedTrainer
    from fleetbus_workers.learner.worker import run_learner

    tasks = [Task(key=f"t{index}", prompt="p", config={"turns": 3}) for index in range(8)]
    curriculum = Curriculum(tasks, [], seed=configuration.run.seed)
    await run_learner(
        bus, configuration=configuration, name=name, drain=drain, trainer=ScriptedTrainer(), curriculum=curriculum
    )


async def play(bus: Any, configuration: Any, name: str, drain: anyio.Event) -> None:
    from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
    from fleetbus_workers.environment.worker import run_environment

    await run_environment(bus, configuration=configuration, name=name, drain=drain, make=ScriptedEnvironment)


async def infer(bus: Any, configuration: Any, name: str, drain: anyio.Event) -> None:
    from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
    from fleetbus_workers.inference.worker import run_inference

    sampler = ScriptedSampler(delay=lambda _: PACE_SECONDS)
    await run_inference(bus, configuration=configuration, name=name, drain=drain, sampler=sampler, template=ScriptedTemplate())


async def record(folder: Path, bus: Any, configuration: Any, name: str, drain: anyio.Event) -> None:
    from fleetbus_workers.recorder.worker import run_recorder

    await run_recorder(bus, configuration=configuration, name=name, drain=drain, folder=folder)


def main(role: str, name: str, *arguments: str) -> int:
    if role == "init":
        from fleetbus_workers.cli.program import run_program

        return run_program(["init"])
    from fleetbus_workers.cli.roles.role import run_role

    archive = Path(*arguments) if role == "recorder" else Path()
    work: Any = {"learner": learn, "environment": play, "inference": infer, "recorder": partial(record, archive)}[role]
    return run_role(role, lambda: work, {"name": name})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
