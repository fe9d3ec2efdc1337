"""Harbor tasks played for real, in the sandbox and (`just test-docker`) in containers: honest and forging policies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus.tasks.harbor import build_task, read_harbor_task
from fleetbus_schemas import Action, ToolCall
from fleetbus_workers.environment.adapters.harbor import sandbox_box
from fleetbus_workers.environment.adapters.harbor.box import Recipe
from fleetbus_workers.environment.adapters.harbor.docker_box import DockerBoxes
from fleetbus_workers.environment.adapters.harbor.environment import HarborEnvironment
from fleetbus_workers.environment.adapters.harbor.factory import HarborEnvironments
from fleetbus_workers.environment.adapters.harbor.sandbox_box import PREFIX, SandboxBox, SandboxBoxes
from fleetbus_workers.environment.base import EnvironmentFailed, Step
from fleetbus_workers.environment.isolation.foreign_files import sweep_folders
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, find_isolation
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.ownership import build_process_owner
from tests.support.processes import children, until

OURS = Path(__file__).parents[2] / "docs/examples/harbor"
TASKS = ("log-report", "repair-inventory", "roman-numerals")
SECONDS = 400
"""For what hangs alone: on a busy machine a container takes a minute to start."""
pytestmark = [pytest.mark.timeout(450), pytest.mark.integration]


@pytest.fixture(params=["sandbox", pytest.param("docker", marks=pytest.mark.docker)])
async def boxes(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    if request.param == "sandbox":
        try:
            await find_isolation()
        except IsolationUnavailable as unavailable:
            pytest.skip(str(unavailable))
    before = list_folders()
    yield request.param
    assert list_folders() == before, "a folder of a box is left"
    await until(lambda: not children())


@pytest.fixture
def sandbox() -> None:
    try:
        require_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))


def list_folders() -> set[Path]:
    """Those of this process; others may be at work beside it."""
    return set(Path(tempfile.gettempdir()).glob(f"{PREFIX}{build_process_owner()}-*"))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """A copy of one of our tasks with some files replaced."""

    def copy(name: str, files: dict[str, str]) -> Path:
        folder = tmp_path / "tasks" / name
        shutil.copytree(OURS / name, folder)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return copy


class Player:
    """Plays one episode of a task."""

    def __init__(self, environment: HarborEnvironment) -> None:
        self.environment = environment

    async def say(self, text: str) -> Step:
        return await self.environment.step(Action(episode_id="e", attempt=1, turn=0, text=text))

    async def run(self, command: str) -> str:
        step = await self.say(f"```bash\n{command}\n```")
        (message,) = step.messages
        assert isinstance(message.content, str)
        return message.content.removeprefix("Tool result:\n")

    async def finish(self) -> tuple[float | None, str]:
        await self.say("I am finished. <done>")
        verdict = await self.environment.verify()
        return verdict.reward, verdict.reason


@asynccontextmanager
async def playing(boxes: str, folder: Path, *, warm: int = 0, prompt: str = "compact") -> AsyncIterator[Player]:
    settings = Configuration(
        environment=EnvironmentSettings(boxes=boxes, warm=warm),  # type: ignore[arg-type]
        limits=LimitSettings(verify=240, tool_call=20),
    )
    environments = HarborEnvironments(f"harbor:{folder}", settings, prompt=prompt, observation_bytes=4000)
    failed: EnvironmentFailed | None = None
    with anyio.fail_after(SECONDS):
        async with environments.run():
            environment = environments()
            try:
                await environment.open(build_task(read_harbor_task(folder)))
            except EnvironmentFailed as error:
                failed = error
            else:
                await environment.reset()
                yield Player(environment)
            finally:
                await environment.close()
    if failed is not None:
        raise failed


@pytest.mark.parametrize("name", TASKS)
async def test_the_solution_gets_the_full_reward_and_doing_nothing_none(boxes: str, name: str) -> None:
    async with playing(boxes, OURS / name) as player:
        assert (await player.environment.solve(240)).reward == 1.0
    async with playing(boxes, OURS / name) as player:
        assert (await player.environment.do_nothing()).reward == 0.0


async def test_a_policy_works_in_a_shell_whose_files_and_processes_stay(boxes: str) -> None:
    async with playing(boxes, OURS / "roman-numerals") as player:
        assert await player.run("pwd; echo x > here; exit 3") == "/app\n[exit code 3]"
        assert await player.run("cat here; (sleep 30 & echo $! > pid)") == "x"
        assert await player.run("kill -0 $(cat pid) && echo alive") == "alive"
        assert "No command found" in (await player.say("Hm.")).messages[0].content
        assert "[the command did not end in time" in await player.run("sleep 60")
        assert (await player.run("ls -A /tests /solution /logs/verifier")).count("\n") <= 5, "nothing of the tests is there"
        assert await player.run("find /tests /solution /logs/verifier -type f") == "(no output)"
        assert (await player.finish())[0] == 0.0


WRITE = "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json"
FORGERIES = {
    "a reward written before": f"mkdir -p /logs/verifier; {WRITE}",
    "a process that writes it later": f"nohup bash -c 'while sleep 0.02; do {WRITE}; done' >/dev/null 2>&1 & sleep 0.1",
    "many that write it": f"for i in 1 2 3 4; do nohup bash -c 'while :; do {WRITE}; done' >/dev/null 2>&1 & done; sleep 0.1",
    "tests of its own": f"mkdir -p /tests; echo '{WRITE}' > /tests/test.sh; chmod +x /tests/*",
    "a link to the reward": "ln -sf /app/one /logs/verifier/reward.json; echo 1 > /app/one",
    "a link out of the box": "rm -rf /app/inventory; ln -s /etc /app/inventory",
}


@pytest.mark.parametrize("name", ["repair-inventory", "roman-numerals"])
@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_reward_cannot_be_forged_from_outside_the_tests(boxes: str, name: str, forgery: str) -> None:
    async with playing(boxes, OURS / name) as player:
        await player.run(FORGERIES[forgery])
        assert (await player.finish())[0] == 0.0


async def test_folders_that_cannot_be_entered_are_removed_all_the_same(boxes: str) -> None:
    async with playing(boxes, OURS / "roman-numerals") as player:
        await player.run(
            "mkdir -p /app/a/b/c /logs/artifacts/d; touch /app/a/b/c/f; chmod 0 /app/a/b/c /app/a/b /app/a /logs/artifacts/d"
        )
        assert (await player.finish())[0] == 0.0


async def test_links_of_the_policy_lead_nowhere_when_files_are_put_and_read(
    boxes: str, copy: Callable[..., Path], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    tests = "#!/bin/bash\nif grep -qs s3cret /app/roman.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    folder = copy("roman-numerals", {"tests/test.sh": tests})
    async with playing(boxes, folder) as player:
        await player.run(f"ln -s {secret} /app/roman.py")
        assert (await player.finish())[0] == 0.0


async def test_steps_go_on_only_above_their_least_reward(boxes: str) -> None:
    async with playing(boxes, OURS / "log-report") as player:
        step = await player.say("<done>")
        assert step.terminated and not step.messages
        assert (await player.environment.verify()).reward == 0.0
    async with playing(boxes, OURS / "log-report") as player:
        await player.run("grep ' ERROR ' service.log > errors.log")
        step = await player.say("<done>")
        assert not step.terminated and "report.json" in str(step.messages[0].content)
        assert await player.run("find /tests /logs/verifier -type f") == "(no output)", "tests of a step do not stay"
        assert await player.finish() == (0.5, "")


async def test_a_model_with_its_own_tool_format_gets_results_of_its_calls_and_ends_by_making_none(boxes: str) -> None:
    def act(text: str, *calls: ToolCall, **fields: Any) -> Action:
        return Action(episode_id="e", attempt=1, turn=0, text=text, tool_calls=calls, **fields)

    async with playing(boxes, OURS / "log-report", prompt="template") as player:
        command = "grep ' ERROR ' service.log > errors.log; wc -l < errors.log"
        calls = [ToolCall(name="bash", arguments={"command": each}, id=f"c{n}") for n, each in enumerate((command, "rm *"))]
        first, second = (await player.environment.step(act("", *calls))).messages
        assert (first.role, first.tool_call_id, first.name) == ("tool", "c0", "bash") and "Tool result:" in str(first.content)
        assert second.tool_call_id == "c1" and "not executed" in str(second.content)
        (again,) = (await player.environment.step(act("half a call", tool_call_errors=("no JSON",)))).messages
        assert again.role == "user" and "no JSON" in str(again.content)
        (cut,) = (await player.environment.step(act("Now I", finish_reason="length"))).messages
        assert "limit of tokens" in str(cut.content)
        (following,) = (await player.environment.step(act("The errors are in errors.log."))).messages
        assert following.role == "user" and "report.json" in str(following.content)
        assert (await player.environment.step(act("I give up."))).terminated
        assert (await player.environment.verify()).reward == 0.5


async def test_a_box_that_is_prepared_opens_while_another_one_is_built(
    boxes: str, copy: Callable[..., Path], tmp_path: Path
) -> None:
    ready = copy("roman-numerals", {})
    building = copy("repair-inventory", {"environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nRUN sleep 3600\n"})
    settings = Configuration(environment=EnvironmentSettings(boxes=boxes))  # type: ignore[arg-type]
    environments = HarborEnvironments(f"harbor:{ready.parent}", settings, prompt="compact", observation_bytes=4000)
    with anyio.fail_after(SECONDS):
        async with environments.run(), anyio.create_task_group() as group:
            for _ in range(2):
                environment = environments()
                await environment.open(build_task(read_harbor_task(ready)))
                await environment.close()
                group.start_soon(environments().open, build_task(read_harbor_task(building)))
                await until(lambda: is_building(environments))
            group.cancel_scope.cancel()


def is_building(environments: HarborEnvironments) -> bool:
    assert isinstance(environments._maker, SandboxBoxes | DockerBoxes)
    return environments._maker._building.locked()


async def test_a_box_that_cannot_be_kept_warm_ends_nothing(sandbox: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started = SandboxBoxes.start
    failed: list[OSError] = []

    async def start_once(self: SandboxBoxes, recipe: Recipe) -> SandboxBox:
        if self._boxes:
            failed.append(OSError(errno.ENOSPC, "no space left"))
            raise failed[0]
        return await started(self, recipe)

    monkeypatch.setattr(SandboxBoxes, "start", start_once)
    async with playing("sandbox", OURS / "roman-numerals", warm=1) as player:
        await until(lambda: bool(failed))
        assert await player.run("echo on") == "on"


BROKEN = {
    "no reward": ("exit 0", "the tests wrote no reward"),
    "no number": ("echo maybe > /logs/verifier/reward.txt", "not a finite number"),
    "not finite": ("echo nan > /logs/verifier/reward.txt", "not a finite number"),
    "several rewards": ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', "none is called reward"),
    "endless": ("sleep 60", "took longer than 1 s"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_tests_without_a_verdict_give_no_reward(boxes: str, copy: Callable[..., Path], name: str) -> None:
    script, words = BROKEN[name]
    toml = (OURS / "repair-inventory/task.toml").read_text().replace("timeout_sec = 60.0", "timeout_sec = 1.0")
    folder = copy("repair-inventory", {"tests/test.sh": f"#!/bin/bash\n{script}\n", "task.toml": toml})
    async with playing(boxes, folder) as player:
        reward, reason = await player.finish()
        assert reward is None and words in reason


async def test_an_unhealthy_box_fails_its_episode(boxes: str, copy: Callable[..., Path]) -> None:
    toml = (OURS / "roman-numerals/task.toml").read_text()
    check = "\n[environment.healthcheck]\ncommand = 'test -e /app/ready'\ninterval_sec = 0.01\nretries = 2\n"
    folder = copy("roman-numerals", {"task.toml": toml + check})
    with pytest.raises(EnvironmentFailed, match="the healthcheck failed 2 times"):
        async with playing(boxes, folder):
            raise AssertionError("not reached")


async def test_a_full_disk_ends_what_runs_and_nothing_else(sandbox: None, copy: Callable[..., Path]) -> None:
    toml = (OURS / "roman-numerals/task.toml").read_text().replace("storage_mb = 256", "storage_mb = 8")
    async with playing("sandbox", copy("roman-numerals", {"task.toml": toml})) as player:
        assert "the disk is full" in await player.run("for i in 1 2 3; do head -c 6000000 /dev/zero > $i; done")
        assert await player.run(f"sleep {3 * sandbox_box.STORAGE_SECONDS}; rm -f 1 2 3; echo on") == "on"


async def test_a_disk_that_is_full_takes_no_more_however_many_commands_are_run(
    sandbox: None, copy: Callable[..., Path]
) -> None:
    toml = (OURS / "roman-numerals/task.toml").read_text().replace("storage_mb = 256", "storage_mb = 8")
    async with playing("sandbox", copy("roman-numerals", {"task.toml": toml})) as player:
        assert "the disk is full" in await player.run("for i in 1 2 3; do head -c 6000000 /dev/zero > $i; done")
        pause = f"sleep {20 * sandbox_box.STORAGE_SECONDS}"
        full = await player.run(f"head -c 6000000 /dev/zero > 4; {pause}")
        assert "the disk is full" in full
        assert await player.run(f"{pause}; head -c 6000000 /dev/zero > 5") == full, (
            "what one command left over is not another's room"
        )


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('network_mode = "public"', "network_mode must be 'no-network'"),
        ('network_mode = "no-network"\ndocker_image = "x"', "docker_image x is an image"),
    ],
)
async def test_what_needs_docker_is_refused_in_the_sandbox(
    sandbox: None, copy: Callable[..., Path], toml: str, words: str
) -> None:
    text = (OURS / "roman-numerals/task.toml").read_text().replace('network_mode = "no-network"', toml)
    with pytest.raises(EnvironmentFailed, match=words):
        async with playing("sandbox", copy("roman-numerals", {"task.toml": text})):
            raise AssertionError("not reached")


async def test_a_warm_box_serves_one_episode_and_is_removed(boxes: str) -> None:
    folder = OURS / "roman-numerals"
    settings = Configuration(environment=EnvironmentSettings(boxes=boxes, warm=1))  # type: ignore[arg-type]
    environments = HarborEnvironments(f"harbor:{folder}", settings, prompt="compact", observation_bytes=4000)
    task = build_task(read_harbor_task(folder))
    with anyio.fail_after(SECONDS):
        async with environments.run():
            seen = []
            for _ in range(3):
                environment = environments()
                await environment.open(task)
                player = Player(environment)
                await environment.reset()
                seen.append(await player.run("cat mark 2>/dev/null; touch mark; echo done"))
                await environment.close()
                await until(lambda: any(environments.warm_boxes.values()))
    assert seen == ["done"] * 3


def test_check_names_a_solution_that_fails_and_a_reward_for_nothing(sandbox: None, copy: Callable[..., Path]) -> None:
    copy("roman-numerals", {"solution/solve.sh": "#!/bin/bash\ntrue\n"})
    folder = copy("log-report", {"steps/extract/tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"})
    (folder / "steps/summarize/tests/test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    copy("repair-inventory", {"solution/solve.sh": "#!/bin/bash\necho broken; exit 7\n"})
    command = [sys.executable, "-m", "fleetbus", "tasks", "check", f"harbor:{folder.parent}", "--boxes", "sandbox", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    found = {each["key"]: each["problem"] for each in json.loads(done.stdout)["tasks"]}
    assert done.returncode == 2, done.stderr
    assert found["log-report"] == "doing nothing gets the full reward"
    assert found["roman-numerals"].startswith("its solution does not get 1: the reward is 0")
    assert found["repair-inventory"] == "solve.sh failed with exit code 7: broken"


def test_folders_of_workers_that_died_are_swept() -> None:
    gone = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.uname().nodename[:24]}_999999999_1-"))
    (gone / "box/inner/most").mkdir(parents=True)
    for folder in ("box/inner/most", "box/inner", "box"):
        (gone / folder).chmod(0o000)
    assert gone.name in sweep_folders(PREFIX) and not gone.exists()


@pytest.mark.skipif(not os.environ.get("HARBOR_PYTHON"), reason="HARBOR_PYTHON names a Python >= 3.12 that has harbor")
def test_harbor_itself_accepts_our_tasks() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom harbor.models.task.task import Task\n"
        "for folder in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    task = Task(folder)\n"
        "    assert task.config.schema_version == '1.4'\n"
        "    print(folder.name, len(task.config.steps or []))\n"
    )
    done = subprocess.run(
        [os.environ["HARBOR_PYTHON"], "-W", "error::DeprecationWarning:harbor", "-c", code, str(OURS)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split("\n")[:3] == ["log-report 2", "repair-inventory 0", "roman-numerals 0"], done.stderr
