"""Grades a step of a Harbor task: the tests enter when all of the agent has ended, and the reward is read from a file."""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread
import msgspec

from fleetbus.tasks.harbor import VERIFIER_SECONDS, HarborStep
from fleetbus_workers.environment.adapters.harbor.box import ARTIFACTS, TESTS, VERIFIER_LOGS, Box
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.task_permissions import TaskPermissions

REWARD_BYTES = 64 << 10
REASON_CHARACTERS = 500
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of the tests: ``rewards`` by name, None without a verdict and then with a reason."""

    rewards: dict[str, float] | None
    reason: str = ""

    @property
    def reward(self) -> float | None:
        """The reward called ``reward``, or the only one."""
        if not self.rewards:
            return None
        return self.rewards.get("reward", next(iter(self.rewards.values())) if len(self.rewards) == 1 else None)

    def find_shortfall(self, thresholds: Mapping[str, float]) -> str:
        """The reward that is below its threshold; empty if none is."""
        for name, least in thresholds.items():
            found = (self.rewards or {}).get(name, -math.inf)
            if found < least:
                return f"{name} {found:g} is below {least:g}"
        return ""


async def grade_shared(box: Box, step: HarborStep, variables: Mapping[str, str], seconds: float) -> Grade:
    """Grade in the agent's box; no process of the agent is left, nor a reward that it wrote, and no test stays."""
    await box.end_processes()
    await box.clear(VERIFIER_LOGS)
    await box.clear(TESTS)
    for folder in step.tests:
        await box.put(folder, TESTS)
    try:
        return await _run_tests(box, step, variables, seconds)
    finally:
        await box.end_processes()
        await box.clear(TESTS)
        await box.clear(VERIFIER_LOGS)


async def grade_separately(box: Box, verifier: Box, step: HarborStep, variables: Mapping[str, str], seconds: float) -> Grade:
    """Grade in a box of its own, which gets nothing of the agent's but the artifacts."""
    await box.end_processes()
    with tempfile.TemporaryDirectory(prefix="fleetbus-artifacts-") as folder:
        paths = (ARTIFACTS, *step.artifacts)
        await box.export(paths, Path(folder))
        for number, path in enumerate(paths):
            found, place = await anyio.to_thread.run_sync(_stage_artifact, Path(folder), path, number)
            if found is not None:
                await verifier.put(found, place)
    for tests in step.tests:
        await verifier.put(tests, TESTS)
    return await _run_tests(verifier, step, variables, seconds)


def _stage_artifact(folder: Path, path: str, number: int) -> tuple[Path | None, str]:
    """The folder to be put into a box for an artifact, and where it goes; None if there is no such artifact."""
    found = folder / path.lstrip("/")
    if found.is_dir():
        return found, path
    if not found.is_file():
        return None, path
    single = folder / f".single-{number}"
    single.mkdir()
    shutil.move(found, single / found.name)
    return single, str(Path(path).parent)


async def _run_tests(box: Box, step: HarborStep, variables: Mapping[str, str], seconds: float) -> Grade:
    limit = min(seconds, step.verifier.timeout_sec or VERIFIER_SECONDS)
    command = f"chmod +x {TESTS}/test.sh 2>/dev/null; exec {TESTS}/test.sh"
    done = await box.run(command, user=step.verifier.user, variables=variables, seconds=limit)
    if done.ended == "time":
        return Grade(rewards=None, reason=f"the tests took longer than {limit:g} s")
    grade = await read_reward(box)
    if grade.rewards is None:
        tail = done.output.strip()[-REASON_CHARACTERS:]
        return Grade(rewards=None, reason=f"{grade.reason} (exit code {done.exit_code}): {tail}")
    return grade


async def read_reward(box: Box) -> Grade:
    """`reward.json` if there is one, else ``reward.txt``, as harbor reads them; None and why for what is no finite number."""
    content = await box.read(f"{VERIFIER_LOGS}/reward.json", REWARD_BYTES)
    if content is not None:
        return parse_json(content)
    content = await box.read(f"{VERIFIER_LOGS}/reward.txt", REWARD_BYTES)
    if content is None:
        return Grade(rewards=None, reason="the tests wrote no reward")
    try:
        value = float(content.decode()) if len(content) <= REWARD_BYTES else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        return Grade(rewards=None, reason=f"reward.txt has {content[:80]!r}, not a finite number")
    return Grade(rewards={"reward": value})


def parse_json(content: bytes) -> Grade:
    """The rewards of a `reward.json`: a number, or an object of numbers."""
    try:
        value = json.loads(content) if len(content) <= REWARD_BYTES else None
    except (ValueError, RecursionError):
        value = None
    rewards = value if isinstance(value, dict) else {"reward": value}
    plain = {
        str(name): float(each)
        for name, each in rewards.items()
        if isinstance(each, int | float) and abs(each) < 1e300 and math.isfinite(each)
    }
    if not rewards or len(plain) != len(rewards):
        return Grade(rewards=None, reason=f"reward.json has {content[:80]!r}, not finite numbers")
    grade = Grade(rewards=plain)
    if grade.reward is None:
        return Grade(rewards=None, reason=f"reward.json has {', '.join(plain)}: none is called reward")
    return grade


def resolve_variables(variables: Mapping[str, str], permissions: TaskPermissions) -> dict[str, str]:
    """Variables of a task, with those of the worker's own that they name as ``${NAME}`` if the operator permits it, else with
    the default after ``:-``. Raises `EnvironmentFailed` for one that has neither."""

    def replace(found: re.Match[str]) -> str:
        if found[1] in permissions.variables and found[1] in os.environ:
            return os.environ[found[1]]
        if found[2] is None:
            permissions.check_variable(found[1])
            raise EnvironmentFailed(f"the task needs the variable {found[1]}, which this worker has not")
        return found[2]

    return {name: _TEMPLATE.sub(replace, value) for name, value in variables.items()}
