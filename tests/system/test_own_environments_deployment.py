"""Own classes in a fleet: what blocks or crashes in one episode is that episode's outcome, and results name their dataset."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from fleetbus.tasks.files import dump_tasks, load_dataset
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.python_class.process_pool import ProcessPool
from tests.support.small_deployment import small_deployment

MODULE = """
import os
import signal

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.base import Start, Step, Verdict


class Mine:
    replayable = False

    def open(self, task):
        self.task, self.steps = task, 0

    def reset(self):
        return Start(messages=(ChatMessage(role="user", content=self.task.prompt),))

    def step(self, action):
        self.steps += 1
        if self.task.config.get("crashes") and self.steps == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.steps == 3:
            return Step(terminated=True)
        return Step(messages=(ChatMessage(role="user", content=f"turn {self.steps}"),))

    def state(self):
        return {}

    def verify(self):
        return Verdict(reward=0.5)

    def close(self):
        pass
"""


@pytest.mark.timeout(120)
async def test_a_crash_is_one_episode_s_outcome_and_every_result_names_its_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet_class.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "data" / "v0.2").mkdir(parents=True)
    written = [Task(key=f"t{index}", prompt="Play.", config={"crashes": True} if index == 2 else {}) for index in range(6)]
    dump_tasks(written, tmp_path / "data" / "v0.2" / "tasks.json")
    tasks = load_dataset("data@v0.2")
    pool = ProcessPool("fleet_class:Mine", processes=2)
    with anyio.fail_after(100):
        async with small_deployment() as fleet:
            async with pool.run():
                fleet.environment("environment-1", make=pool, slots=4)
                fleet.inference("inference-1")
                for task in tasks:
                    await fleet.request(task.key, task=task)
                results = {result.task_key: result for result in await fleet.all_results(len(tasks))}
                await fleet.drain_members()
    assert {key: result.outcome for key, result in results.items()} == {
        "t2": "env_failed",
        **{f"t{index}": "completed" for index in (0, 1, 3, 4, 5)},
    }
    assert "SIGSEGV" in results["t2"].error
    assert {result.reward for key, result in results.items() if key != "t2"} == {0.5}
    assert {result.dataset_version for result in results.values()} == {"v0.2"}
