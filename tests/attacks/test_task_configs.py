"""The config of a task, from a file or over a gateway: nothing of this machine is sent, read, imported or ended by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.python_class.environment import ClassEnvironment
from fleetbus_workers.environment.adapters.remote_gym.config import read_config
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages
from fleetbus_workers.environment.task_permissions import NotPermitted, TaskPermissions, check_arguments
from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone


OPERATOR = ("http://gym:8000/base",)
NOTHING = TaskPermissions()


@pytest.mark.parametrize(
    "url",
    [
        "http://attacker:8000/base",
        "http://gym:8001/base",
        "https://gym:8000/base",
        "http://gym:8000/other",
        "http://gym:8000/based",
        "http://gym:8000/base/../other",
        "http://gym:8000/base/%2e%2e/other",
        "http://gym.attacker:8000/base",
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:6379",
    ],
)
def test_a_task_has_no_server_called_that_the_operator_did_not_list(url: str) -> None:
    with pytest.raises((NotPermitted, UserError)):
        read_config({"base_urls": [url]}, OPERATOR, NOTHING)


def test_a_task_may_name_a_listed_server() -> None:
    config, _ = read_config({"base_urls": ["http://gym:8000/base/one"]}, OPERATOR, NOTHING)
    assert config.base_urls == ("http://gym:8000/base/one",)
    config, _ = read_config({"base_urls": ["http://other"]}, (), TaskPermissions(urls=("http://other",)))
    assert config.base_urls == ("http://other",)


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HOME", "FLEETBUS_NATS_URL", ""])
def test_a_task_has_no_variable_of_the_worker_sent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name or "X", "sk-mine")
    with pytest.raises(NotPermitted, match="task-variables"):
        read_config({"token": f"${name}"}, OPERATOR, NOTHING)


def test_the_key_of_the_protocol_and_listed_variables_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_API_KEY", "a")
    monkeypatch.setenv("OTHER_KEY", "b")
    assert read_config({"token": "$GYM_API_KEY"}, OPERATOR, NOTHING)[0].token == "a"
    assert read_config({"token": "$OTHER_KEY"}, OPERATOR, TaskPermissions(variables=("OTHER_KEY",)))[0].token == "b"


def test_a_task_has_no_file_read(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root:hash")
    with pytest.raises(UserError) as caught:
        read_config({"url_file": str(tmp_path / "shadow")}, OPERATOR, NOTHING)
    assert "hash" not in str(caught.value)


@pytest.mark.parametrize("value", ["/etc/passwd", "../x", "C:\\x", "~/.ssh/id", "a\0", "..", {"x": ["/etc"]}, {"/etc": 1}])
def test_arguments_of_a_task_name_no_file(value: Any) -> None:
    with pytest.raises(NotPermitted):
        check_arguments({"xml_file": value}, "kwargs")


MODULE = "module_that_ends_its_importer"


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise SystemExit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "config", [{"id": "CartPole-v1", "modules": [MODULE]}, {"id": f"{MODULE}:CartPole-v1"}, {"id": "antigravity:X-v0"}]
)
async def test_a_task_has_no_module_imported(deadly: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("gymnasium")
    from fleetbus_workers.environment.adapters.gymnasium.environment import GymnasiumEnvironment

    with pytest.raises(NotPermitted, match="task-modules"):
        await GymnasiumEnvironment().open(Task(key="t", config=config))
    assert not await anyio.Path(deadly / "imported").exists()


async def test_a_listed_module_that_exits_ends_its_episode_and_not_the_worker(deadly: Path) -> None:
    pytest.importorskip("gymnasium")
    from fleetbus_workers.environment.adapters.gymnasium.environment import GymnasiumEnvironment

    environment = GymnasiumEnvironment(permissions=TaskPermissions(modules=(MODULE,)))
    stages = Stages()
    with pytest.raises(EpisodeEnded) as ended, stages.time_limit("open", 20):
        await environment.open(Task(key="t", config={"id": "CartPole-v1", "modules": [MODULE]}))
    assert (ended.value.outcome, ended.value.error_class) == ("env_failed", "SystemExit")


class Rage(BaseException):
    """What no `except Exception` catches."""


class Ending:
    """Raises in the call that its task names."""

    replayable = True

    def __init__(self) -> None:
        self.where, self.what = "", ""

    def _act(self, where: str) -> None:
        if where == self.where:
            raise {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt(), "Rage": Rage()}[self.what]

    async def open(self, task: Task) -> None:
        self.where, self.what = task.config["where"], task.config["what"]
        self._act("open")

    async def reset(self) -> Start:
        self._act("reset")
        return Start()  # type: ignore[call-arg]

    async def step(self, action: Action) -> Step:
        self._act("step")
        return Step(terminated=True)

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        self._act("verify")
        return Verdict(reward=1.0)

    async def close(self) -> None:
        self._act("close")


class EndingInThreads(Ending):
    def open(self, task: Task) -> None:  # type: ignore[override]
        self.where, self.what = task.config["where"], task.config["what"]
        self._act("open")


@pytest.mark.parametrize("what", ["SystemExit", "KeyboardInterrupt", "Rage"])
@pytest.mark.parametrize("make", [Ending, lambda: ClassEnvironment(EndingInThreads, None)])
async def test_no_exception_of_foreign_code_leaves_its_stage(make: Callable[[], Any], what: str) -> None:
    stages, environment = Stages(), make()
    with pytest.raises(EpisodeEnded) as ended, stages.time_limit("open", 20):
        await environment.open(Task(key="t", config={"where": "open", "what": what}))
    assert (ended.value.outcome, ended.value.error_class) == ("env_failed", what)


async def test_a_cancellation_is_no_failure_of_the_environment() -> None:
    stages, reached = Stages(), anyio.Event()

    async def wait() -> None:
        with stages.time_limit("step", 20):
            reached.set()
            async with anyio.create_task_group() as inner:
                inner.start_soon(anyio.sleep_forever)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)  # were it an `EpisodeEnded`, the group would raise it
            await reached.wait()
            group.cancel_scope.cancel()
    assert stages.timings["step"] < 10
