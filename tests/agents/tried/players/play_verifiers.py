"""verifiers' evaluation of one task with its default harness, which has a shell, as a process of this machine."""

import subprocess
from pathlib import Path

from common import PROMPT, URL

TASKS = """
import verifiers.v1 as vf

__all__ = ["TriedTaskset"]

class TriedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        return 1.0

class TriedTaskset(vf.Taskset[TriedTask, vf.TasksetConfig]):
    def load(self):
        return [TriedTask(vf.TaskData(prompt=PROMPT), self.config.task)]
"""
Path("tried_tasks.py").write_text(f"PROMPT = {PROMPT!r}\n{TASKS}")
client = ["--client.base-url", URL, "--client.api-key-var", "OPENAI_API_KEY", "-m", "policy"]
where = ["--env.agent.runtime.type", "subprocess", "--no-push"]
status = subprocess.run(["env", "PYTHONPATH=.", "vf-eval", "tried_tasks", "-n", "1", *client, *where]).returncode
for traces in Path("outputs").rglob("traces.jsonl"):
    print(traces.read_text()[-3000:])
raise SystemExit(status)
