"""`fleetbus up` whose policy says given texts and whose learner has no model; all else is what users run.

``python canned_up.py up ARGUMENTS`` is the command; ``... role ROLE NAME CONFIG`` is what it starts. The variable CANNED_TEXTS
names a file with the texts of an episode, in order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.tasks.files import load_dataset
from tests.support.servers import connect


def choose_command(configuration_file: Path) -> Callable[[str, str], Sequence[str]]:
    return lambda role, name: [sys.executable, __file__, "role", role, name, str(configuration_file)]


def up(arguments: list[str]) -> int:
    import fleetbus_workers.up.command
    from fleetbus_workers.cli.program import run_program

    setattr(fleetbus_workers.up.command, "build_role_command", choose_command)  # noqa: B010
    return run_program(["up", *arguments])


def play_role(role: str, name: str, configuration_file: str) -> int:
    from fleetbus_workers.up.parent_death import exit_with_parent

    exit_with_parent()
    configuration = msgspec.json.decode(Path(configuration_file).read_bytes(), type=Configuration)
    anyio.run(_work, role, name, configuration, backend_options={"use_uvloop": True})
    return 0


async def _work(role: str, name: str, configuration: Configuration) -> None:
    drain = anyio.Event()

    async def drain_on_signal() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                drain.set()

    url, run = os.environ["FLEETBUS_NATS_URL"], configuration.run.name
    async with connect(url, run=run, role=role, worker=name) as bus, anyio.create_task_group() as tasks:
        tasks.start_soon(drain_on_signal)
        if role == "inference":
            from fleetbus_workers.inference.canned import CannedSampler
            from fleetbus_workers.inference.worker import run_inference

            sampler = CannedSampler(*json.loads(await anyio.Path(os.environ["CANNED_TEXTS"]).read_text()))
            engine = {"sampler": sampler, "template": sampler.template}
            await run_inference(bus, configuration=configuration, name=name, drain=drain, **engine)  # type: ignore[arg-type]
        else:
            from fleetbus_workers.learner.curriculum import Curriculum
            from fleetbus_workers.learner.scripted import ScriptedTrainer
            from fleetbus_workers.learner.worker import run_learner

            found = load_dataset(configuration.run.tasks)
            curriculum, trainer = Curriculum(found, found, seed=1), ScriptedTrainer()
            await run_learner(bus, configuration=configuration, name=name, drain=drain, trainer=trainer, curriculum=curriculum)
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    sys.exit(up(sys.argv[2:]) if sys.argv[1] == "up" else play_role(*sys.argv[2:]))
