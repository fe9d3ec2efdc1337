"""mini-swe-agent, unmodified, on Harbor tasks: its own loop, its commands in the task's box, its model behind a gateway.

``python mini_swe_player.py URL FOLDER EPISODES AT_A_TIME`` plays so many episodes of the tasks in FOLDER, some of them at a
time. A task of several steps is a conversation per step.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.resources import files
from typing import Any

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import anyio
import httpx
import yaml  # type: ignore[import-untyped]
from anyio import from_thread, to_thread
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.specs import build_environment_factory

COMMAND_SECONDS = 60.0
FINISHED = Action(episode_id="", attempt=1, turn=0, text="<done>")
CONFIGURATION = yaml.safe_load((files("minisweagent") / "config" / "mini.yaml").read_text())


class BoxEnvironment(LocalEnvironment):
    """The agent's view of a box."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        done = from_thread.run(self._run, action.get("command", ""))
        output = {"output": done.output, "returncode": done.exit_code, "exception_info": ""}
        self._check_finished(output)
        return output


async def play(session: dict[str, Any], folder: str) -> float | None:
    """The reward that the task's own tests give."""
    shown = session["task"]
    task = Task(key=shown["key"], prompt=shown["prompt"], config=shown["config"], env=shown["env"])
    factory = build_environment_factory(f"harbor:{folder}", verifier=None)  # type: ignore[arg-type]
    async with factory.run():
        harbor: Any = factory()
        try:
            await harbor.open(task)
            instruction = (await harbor.reset()).messages[-1].content
            while True:
                await to_thread.run_sync(solve, session, harbor, instruction)
                step = await harbor.step(FINISHED)
                if step.terminated or step.truncated:
                    break
                instruction = step.messages[-1].content
            reward: float | None = (await harbor.verify()).reward
            return reward
        finally:
            await harbor.close()


def solve(session: dict[str, Any], harbor: Any, instruction: str) -> None:
    run = partial(harbor.box.run, user=None, variables={}, seconds=COMMAND_SECONDS)
    model = LitellmModel(
        model_name="openai/policy", model_kwargs={"api_base": session["openai_base_url"], "api_key": session["key"]}
    )
    wanted = {name: CONFIGURATION["agent"][name] for name in ("system_template", "instance_template")}
    DefaultAgent(model, BoxEnvironment(run), **wanted, step_limit=8).run(instruction)


async def main() -> None:
    url, folder, episodes, at_a_time = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    numbers = iter(range(episodes))

    async def play_next() -> None:
        session = (await http.get(f"{url}/sessions/next", params={"wait": 300})).raise_for_status().json()
        reward = {"reward": await play(session, folder)}
        key = {"Authorization": f"Bearer {session['reward_key']}"}
        answer = await http.post(f"{session['url']}/reward", json=reward, headers=key)
        print(session["task"]["key"], answer.json(), flush=True)

    async def play_in_turn() -> None:
        for _ in numbers:
            await play_next()

    async with httpx.AsyncClient(timeout=400) as http, anyio.create_task_group() as group:
        next(numbers)
        await play_next()  # alone: litellm loads its libraries in the first call, and does not bear that from several threads
        for _ in range(at_a_time):
            group.start_soon(play_in_turn)


if __name__ == "__main__":
    anyio.run(main)
