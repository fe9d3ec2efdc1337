"""`fleetbus up` with scripted role processes: no torch, no policy, but a real server, a real log and real signals.

``python scripted_roles.py up ARGUMENTS`` is the command; ``... role ROLE NAME CONFIG`` is what it starts. The variable SCRIPT
says how the learner behaves: ``train`` (writes what a learner writes, then exits 0), ``wait`` (until drained), ``stubborn``
(ignores SIGTERM), ``crash`` (at once, always), ``crash-once``, ``replaced`` (another one begins after its first step).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from fleetbus.bus.base import Bus
from fleetbus_schemas import (
    EpisodeFinished,
    EvaluationFinished,
    Exclusion,
    Heartbeat,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    Subjects,
    TrainingFinished,
    WorkerStarted,
    encode,
)
from tests.support.servers import connect

EPISODES_PER_STEP = 4


def scripted_command(_configuration_file: Path) -> Callable[[str, str], Sequence[str]]:
    return lambda role, name: [sys.executable, __file__, "role", role, name, str(_configuration_file)]


def up(arguments: list[str]) -> int:
    import fleetbus_workers.up.command
    from fleetbus_workers.cli.program import run_program

    setattr(fleetbus_workers.up.command, "build_role_command", scripted_command)  # noqa: B010
    return run_program(["up", *arguments])


def role(role: str, name: str, configuration_file: str) -> int:
    from fleetbus_workers.up.parent_death import exit_with_parent

    exit_with_parent()
    behaviour = os.environ.get("SCRIPT", "train") if role == "learner" else "wait"
    print(f"{name} behaves: {behaviour}, {sorted(key for key in os.environ if key.startswith('FLEETBUS_'))}", flush=True)
    if behaviour == "crash" or (behaviour == "crash-once" and name == "learner"):
        print("the last words of", name, flush=True)
        return 3
    configuration = json.loads(Path(configuration_file).read_text())
    anyio.run(_work, role, name, behaviour, configuration, backend_options={"use_uvloop": True})
    return 0


async def _work(role: str, name: str, behaviour: str, configuration: dict[str, dict[str, object]]) -> None:
    run = str(configuration["run"]["name"])
    subjects = Subjects(run)
    async with connect(os.environ["FLEETBUS_NATS_URL"], run=run, role=role, worker=name) as bus:
        started = WorkerStarted(role=role, worker=name, pid=os.getpid())  # type: ignore[arg-type]
        await bus.publish(subjects.life(role, name), encode(started))
        if role == "learner" and behaviour == "replaced":
            await _be_replaced(bus, subjects.train("default"))
            return
        if role == "learner" and behaviour in ("train", "crash-once"):
            await _train(bus, subjects, int(str(configuration["learner"]["steps"])))
            return
        await _wait(bus, subjects, role, name, ignore=behaviour == "stubborn")


async def _be_replaced(bus: Bus, training: str) -> None:
    await bus.publish(training, encode(LineageStarted(lineage="l1", worker="learner")))
    await bus.publish(training, encode(StepTrained(lineage="l1", step=1, version=1, episodes=())))
    await bus.publish(training, encode(LineageStarted(lineage="l2", worker="learner-elsewhere-7-ab", parent="l1")))


async def _wait(bus: Bus, subjects: Subjects, role: str, name: str, *, ignore: bool) -> None:
    beat = encode(Heartbeat(role=role, worker=name, slots=8, in_flight=3))  # type: ignore[arg-type]
    await bus.broadcast(subjects.heartbeat(role, name), beat)
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            if not ignore:
                return


async def _train(bus: Bus, subjects: Subjects, steps: int) -> None:
    training, episodes = subjects.train("default"), 0

    async def put(subject: str, message: Message) -> None:
        await bus.publish(subject, encode(message))

    def evaluated(name: str, step: int, success: float, temperature: float) -> EvaluationFinished:
        return EvaluationFinished(
            lineage="a", step=step, version=step, name=name, episodes=8, graded=8, success=success, mean_reward=success,
            temperature=temperature,
        )  # fmt: skip

    await put(training, LineageStarted(lineage="a", worker="learner"))
    await put(training, evaluated("start", 0, 0.25, 1.0))
    for step in range(1, steps + 1):
        ids = [f"e{episodes + index}" for index in range(EPISODES_PER_STEP)]
        episodes += EPISODES_PER_STEP
        for id in ids:
            finished = EpisodeFinished(
                episode_id=id, group_id="g", attempt=1, outcome="completed", worker="environment", reward=1.0, tokens=100,
                timings={"action": 0.5},
            )  # fmt: skip
            await put(subjects.episode(id), finished)
        metrics = {
            "reward": step / steps, "success": step / steps, "staleness_max": 1.0, "logprob_difference_max": 1e-5 * step,
            "seconds_train": 0.25, "seconds_wait": 0.5,
        }  # fmt: skip
        excluded = (Exclusion(episode_id=f"x{step}", reason="stale"),)
        await put(
            training, StepTrained(lineage="a", step=step, version=step, episodes=tuple(ids), excluded=excluded, metrics=metrics)
        )
        published = PolicyPublished(policy="default", version=step, lineage="a", step=step, uri="", manifest=(), size_bytes=0)
        await put(subjects.policy("default"), published)
    await put(training, evaluated("end", steps, 0.75, 1.0))
    await put(training, evaluated("end_greedy", steps, 1.0, 0.0))
    await put(training, TrainingFinished(lineage="a", step=steps, version=steps))


if __name__ == "__main__":
    sys.exit(up(sys.argv[2:]) if sys.argv[1] == "up" else role(*sys.argv[2:]))
