"""Own classes as environments: in threads and in processes, what blocks, what crashes, who gets which device."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.adapters.python_class.environment import build_class_factory, check_class, parse_device_names
from fleetbus_workers.environment.adapters.python_class.process_pool import ProcessPool
from fleetbus_workers.environment.base import Environment, EnvironmentFailed
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.processes import children, until, wait_for_output
from tests.support.tool_calls import NoGrader

pytestmark = pytest.mark.integration

MODULE = '''
import asyncio
import functools
import os
import signal
import threading
import time

import anyio

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict

release = threading.Event()
entered = threading.Event()


class Number:
    """As NumPy's and torch's are."""

    def item(self):
        return 0.5


class Plain:
    """Ordinary functions; does what the action says."""

    replayable = True

    def open(self, task):
        if task.prompt == "closed":
            raise EnvironmentFailed("closed today")
        self.task, self.said = task, []

    def reset(self):
        return Start(messages=(ChatMessage(role="user", content=self.task.prompt),))

    def step(self, action):
        self.said.append(action.text)
        match action.text:
            case "block":
                entered.set()
                release.wait()
            case "sleep":
                time.sleep(600)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "raise":
                raise ValueError("no such move")
            case "wrong":
                return 3
            case "number":
                return Step(reward=Number(), messages=())
            case "loop":
                asyncio.run(asyncio.sleep(0))
        print("a word on standard output")
        content = f"{os.getpid()} {self.task.config.get('device')} {threading.current_thread() is threading.main_thread()}"
        return Step(messages=(ChatMessage(role="user", content=content),))

    def state(self):
        return {"said": self.said}

    def verify(self):
        return Verdict(reward=float(len(self.said)))

    def close(self):
        entered.clear()


class Asynchronous:
    replayable = False

    async def open(self, task):
        self.task = task

    async def reset(self):
        return Start(messages=(ChatMessage(role="user", content=self.task.prompt),))

    async def step(self, action):
        return Step(messages=(ChatMessage(role="user", content=str(self.task.config.get("device"))),), terminated=True)

    async def state(self):
        return {}

    async def verify(self):
        return Verdict(reward=0.5)

    async def close(self):
        pass


class Undeclared(Asynchronous):
    """Its calls are ordinary functions that return what is awaited; what one begins in its task, another ends."""

    def open(self, task):
        return self.begin(task)

    async def begin(self, task):
        self.task = task
        self.loop, self.group = asyncio.get_running_loop(), anyio.create_task_group()
        await self.group.__aenter__()

    def step(self, action):
        assert asyncio.get_running_loop() is self.loop
        return super().step(action)

    def close(self):
        return self.group.__aexit__(None, None, None)


def decorated(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)

    return call


class NeedsLoop(Plain):
    """Its first call is an ordinary one."""

    def open(self, task):
        asyncio.get_running_loop()
        super().open(task)

    @decorated
    async def state(self):
        return {}


class NeverStarts(Plain):
    def __init__(self):
        os._exit(9)
'''

TASK = Task(key="t", prompt="Play.")
SPECS = ("own_classes:Plain", "own_classes:Asynchronous", "pool:own_classes:Plain", "pool:own_classes:Asynchronous")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_classes.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delitem(sys.modules, "own_classes", raising=False)
    yield importlib.import_module("own_classes")
    sys.modules.pop("own_classes", None)


def action(text: str) -> Action:
    return Action(episode_id="e", attempt=1, turn=0, text=text, sampled=b"\1\0\0\0")


async def opened(make: Callable[[], Environment], task: Task = TASK) -> Environment:
    environment = make()
    with anyio.fail_after(50):
        await environment.open(task)
        await environment.reset()
    return environment


async def said(environment: Environment, text: str = "hello") -> str:
    with anyio.fail_after(50):
        return str((await environment.step(action(text))).messages[0].content)


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool("own_classes:Plain", processes=2, devices=("cuda:0", "cuda:1"), replayable=True)
    async with pool.run():
        yield pool
    await until(lambda: not children())


def factory(spec: str, **settings: Any) -> EnvironmentFactory:
    configuration = Configuration(environment=EnvironmentSettings(slots=2, **settings))
    return build_environment_factory(spec, verifier=NoGrader(), configuration=configuration)


@pytest.mark.parametrize("spec", SPECS)
async def test_every_kind_of_class_plays_an_episode(spec: str) -> None:
    made = factory(spec)
    async with made.run():
        environment = await opened(made)
        assert environment.replayable is spec.endswith("Plain")
        await said(environment)
        assert isinstance(await environment.state(), dict)
        assert (await environment.verify()).reward == (1.0 if spec.endswith("Plain") else 0.5)
        await environment.close()
    await until(lambda: not children())


async def test_ordinary_functions_in_a_process_run_where_no_event_loop_does(pool: ProcessPool) -> None:
    environment = await opened(pool)
    step = await environment.step(action("loop"))
    assert str(step.messages[0].content).endswith("True"), "and in the main thread, as everything of a process"
    await environment.close()


async def test_calls_that_turn_out_to_be_asynchronous_share_one_event_loop_and_task() -> None:
    undeclared = ProcessPool("own_classes:Undeclared", processes=1)
    async with undeclared.run():
        for _ in range(2):
            environment = await opened(undeclared)
            await environment.step(action("hello"))
            await environment.close()


async def test_a_coroutine_function_behind_a_decorator_has_all_calls_run_in_a_loop() -> None:
    needing = ProcessPool("own_classes:NeedsLoop", processes=1)
    async with needing.run():
        environment = await opened(needing)
        assert await environment.state() == {}
        await environment.close()


async def test_devices_go_round_by_episode_in_this_process_and_by_process_in_a_pool(pool: ProcessPool) -> None:
    made = factory("own_classes:Asynchronous", devices="cuda:0, cuda:1")
    async with made.run():
        assert [await said(await opened(made)) for _ in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
        named = Task(key="t", prompt="p", config={"device": "mine"})
        assert await said(await opened(made, named)) == "mine"
    both = [await opened(pool), await opened(pool)]
    assert sorted([(await said(environment)).split()[1] for environment in both]) == ["cuda:0", "cuda:1"]
    for environment in both:
        await environment.close()


async def test_blocking_code_in_a_thread_does_not_block_the_worker_and_calls_never_overlap(module: Any) -> None:
    make = build_class_factory(module.Plain, EnvironmentSettings(slots=2))
    async with make.run():
        blocked, other = await opened(make), await opened(make)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(blocked.step, action("block"))
            assert await anyio.to_thread.run_sync(module.entered.wait, 40)
            tasks.cancel_scope.cancel()
        assert (await said(other)).split()[2] == "False"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(blocked.close)
            await said(other)
            assert module.entered.is_set(), "close waits until the step that was given up has ended"
            module.release.set()
        assert not module.entered.is_set()
        await other.close()
    with anyio.fail_after(50):
        while threading.active_count() > 32:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_blocking_code_in_a_process_is_killed_with_its_episode_alone(pool: ProcessPool) -> None:
    blocked, other = await opened(pool), await opened(pool)
    before = await said(other)
    with anyio.move_on_after(0.5) as scope:
        await blocked.step(action("sleep"))
    assert scope.cancelled_caught
    with pytest.raises(EnvironmentFailed, match="gone"):
        await blocked.verify()
    await blocked.close()
    assert await said(other) == before
    replacement = await opened(pool)
    assert (await said(replacement)).split()[1] != before.split()[1], "the successor has the device of the one that is gone"
    await replacement.close()
    await other.close()


@pytest.mark.parametrize(("text", "words"), [("crash", "SIGSEGV"), ("exit", "exit code 3")])
async def test_a_crash_takes_one_episode(pool: ProcessPool, text: str, words: str) -> None:
    crashing, other = await opened(pool), await opened(pool)
    with pytest.raises(EnvironmentFailed, match=words):
        await crashing.step(action(text))
    await crashing.close()
    await said(other)
    await said(await opened(pool))


async def test_a_clean_episode_leaves_its_process_to_the_next(pool: ProcessPool) -> None:
    first = await opened(pool)
    process = (await said(first)).split()[0]
    await first.close()
    second = await opened(pool)
    assert (await said(second)).split()[0] == process != str(os.getpid())
    assert await second.state() == {"said": ["hello"]}, "and none of its state"


async def test_an_episode_beyond_the_last_process_waits_for_one(pool: ProcessPool) -> None:
    playing = [await opened(pool), await opened(pool)]
    waiting: list[Environment] = []

    async def wait() -> None:
        waiting.append(await opened(pool))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await said(playing[0])
        assert not waiting
        await playing[0].close()
    assert await said(waiting[0])


async def test_errors_of_a_class_are_told_as_they_are(pool: ProcessPool) -> None:
    with pytest.raises(EnvironmentFailed, match=r"^closed today$"):
        await opened(pool, Task(key="t", prompt="closed"))
    environment = await opened(pool)
    with pytest.raises(EnvironmentFailed, match=r"^ValueError: no such move$"):
        await environment.step(action("raise"))
    await said(environment)


async def test_an_answer_of_the_wrong_type_is_an_error(pool: ProcessPool, module: Any) -> None:
    make = build_class_factory(module.Plain)
    async with make.run():
        for environment in (await opened(make), await opened(pool)):
            with pytest.raises(Exception, match=r"Step|object"):
                await environment.step(action("wrong"))


async def test_numbers_of_other_libraries_leave_a_process_as_plain_ones(pool: ProcessPool) -> None:
    environment = await opened(pool)
    assert (await environment.step(action("number"))).reward == 0.5


async def test_a_process_that_dies_at_once_is_an_error_and_its_place_stays_usable() -> None:
    pool = ProcessPool("own_classes:NeverStarts", processes=1)
    async with pool.run():
        for _ in range(2):
            environment = pool()
            with pytest.raises(EnvironmentFailed, match="exit code 9"):
                await environment.open(TASK)
            await environment.close()


WORKER = """
import anyio
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.python_class.process_pool import ProcessPool

async def main():
    pool = ProcessPool("own_classes:Plain", processes=1)
    async with pool.run():
        environment = pool()
        await environment.open(Task(key="t", prompt="p"))
        print("open", flush=True)
        await environment.step(Action(episode_id="e", attempt=1, turn=0, text="sleep"))

anyio.run(main)
"""


async def test_a_killed_worker_takes_its_processes_with_it() -> None:
    async with await anyio.open_process([sys.executable, "-c", WORKER], stderr=None) as worker:
        await wait_for_output(worker.stdout, b"open")
        processes = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    assert processes
    await until(lambda: not any(process.is_running() for process in processes))


def test_devices_are_read_from_a_list() -> None:
    assert parse_device_names(" cuda:0,cuda:1 ,") == ("cuda:0", "cuda:1")
    assert parse_device_names("") == ()


@pytest.mark.parametrize("kind", [lambda: None, partial(dict, a=1)])
def test_a_function_in_the_place_of_a_class_is_told_what_is_wanted(kind: Any) -> None:
    with pytest.raises(UserError, match=f"it is a {type(kind).__name__}: name a class"):
        check_class("mine:make", kind)
