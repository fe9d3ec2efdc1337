"""Episodes for prime-rl: one that the policy's bounds end has its verdict, one whose policy failed has none. verifiers' own
server plays them in tests/clients/test_trainers.py; here its classes are stand-ins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar, cast

import pytest

from fleetbus.client.blocking import SharedClient
from fleetbus_schemas import Task
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded
from tests.support.trainer_stand_ins import load_adapter
from tests.unit.test_sampled_episode import FakeClient, FakeSession

One = TypeVar("One")
Two = TypeVar("Two")


class OfOne(Generic[One]):
    pass


class OfTwo(Generic[One, Two]):
    def __init__(self, config: Any) -> None:
        self.config = config


class Interaction:
    """An agent that says "left" in its first ``turns`` turns, and then is stopped, or ``fails``."""

    def __init__(self, turns: int, fails: bool) -> None:
        self._left, self._fails = turns, fails
        self.told: list[str] = []
        self.rewards: dict[str, float] = {}
        task = SimpleNamespace(data=SimpleNamespace(task_key="t"))
        self.trace = SimpleNamespace(errors=[], stop_condition=None, task=task, record_reward=self.rewards.__setitem__)

    async def turn(self, messages: list[dict[str, str]]) -> SimpleNamespace:
        self.told += [message["content"] for message in messages]
        self._left -= 1
        if self._left >= 0:
            return SimpleNamespace(terminated=False, messages=[SimpleNamespace(content="left")])
        if self._fails:
            self.trace.errors.append("the engine is away")
        else:
            self.trace.stop_condition = "max_turns"
        return SimpleNamespace(terminated=True, messages=[])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    built = dict.fromkeys(["AgentConfig", "ProgramResult", "RetryConfig", "SubprocessConfig"], SimpleNamespace)
    members = built | {"EnvConfig": object, "TasksetConfig": object, "TaskData": SimpleNamespace, "HarnessConfig": object}
    generic = {"Env": OfOne, "Harness": OfOne, "Task": OfOne, "Taskset": OfTwo}
    modules: dict[str, dict[str, Any]] = {
        "verifiers.v1": members | generic,
        "verifiers.v1.dialects.chat": {"message_to_wire": dict},
        "openai": {},
    }
    return load_adapter(monkeypatch, "prime_rl", modules)


async def play(module: ModuleType, session: FakeSession, interaction: Interaction) -> None:
    env = module.FleetbusEnv()
    client = cast("SharedClient", FakeClient(session))
    env._source = EpisodeSource(client=client, tasks={"t": Task(key="t")}, max_turns=2**31)

    @asynccontextmanager
    async def interact(task: Any) -> AsyncIterator[Interaction]:
        yield interaction

    try:
        agents = SimpleNamespace(agent=SimpleNamespace(interaction=interact))
        await env.run(SimpleNamespace(data=SimpleNamespace(task_key="t")), agents)
    finally:
        assert session.closed == 1


async def test_an_episode_for_prime_rl_that_its_environment_ends_is_paid_once(module: ModuleType) -> None:
    interaction = Interaction(turns=9, fails=False)
    await play(module, FakeSession(), interaction)
    assert interaction.rewards == {"fleetbus": 1.75}
    assert interaction.told == ["go", "1", "2"]


async def test_an_episode_for_prime_rl_that_its_policy_s_bounds_end_has_its_verdict(module: ModuleType) -> None:
    interaction = Interaction(turns=2, fails=False)
    await play(module, FakeSession(), interaction)
    assert interaction.rewards == {"fleetbus": 1.5}


async def test_an_episode_for_prime_rl_whose_policy_failed_has_no_reward(module: ModuleType) -> None:
    interaction = Interaction(turns=2, fails=True)
    await play(module, FakeSession(), interaction)
    assert interaction.rewards == {}


@pytest.mark.parametrize(("turns", "fault"), [(9, {"fails": 1}), (9, {"unpaid": None}), (0, {})])
async def test_an_episode_for_prime_rl_without_a_verdict_or_a_turn_is_an_error_of_verifiers(
    module: ModuleType, turns: int, fault: dict[str, Any]
) -> None:
    interaction = Interaction(turns=turns, fails=False)
    with pytest.raises(EpisodeExcluded):
        await play(module, FakeSession(**fault), interaction)
    assert interaction.rewards == {}


def test_tasks_for_prime_rl_are_those_of_the_file(module: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text('[{"key": "b", "prompt": "go"}, {"key": "a", "prompt": "go"}]')
    module.FleetbusTask = lambda data, config: (data.task_key, config)  # type: ignore[attr-defined]
    taskset = module.FleetbusTaskset(SimpleNamespace(tasks=str(file), task="settings"))
    assert [*taskset.load()] == [("b", "settings"), ("a", "settings")]
