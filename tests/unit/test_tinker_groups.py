"""Groups for tinker-cookbook. It is played by tests/clients/test_trainers.py; here its classes are stand-ins."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest

from fleetbus_workers.inference.scripted import STOP
from tests.support.trainer_stand_ins import load_adapter
from tests.unit.test_sampled_episode import TURNS, FakeSession, open_source

TYPES = ("ActionExtra", "Env", "EnvGroupBuilder", "RLDataset", "RLDatasetBuilder")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    modules: dict[str, dict[str, Any]] = {
        "chz": {"chz": lambda each: each},
        "tinker": {"ModelInput": SimpleNamespace(from_ints=list)},
        "tinker_cookbook.rl.types": {"StepResult": SimpleNamespace, **{name: type(name, (), {}) for name in TYPES}},
        "tinker_cookbook.tokenizer_utils": {"get_tokenizer": None},
    }
    return load_adapter(monkeypatch, "tinker_cookbook", modules)


async def make_group(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *sessions: FakeSession) -> tuple[Any, list[Any]]:
    source, _ = open_source(*sessions)
    monkeypatch.setattr(module, "_open_source", lambda settings: source)
    builder = module.FleetbusGroupBuilder({}, "t", len(sessions))
    return builder, [*await builder.make_envs()]


async def test_an_episode_that_the_cookbook_ends_has_its_verdict_and_no_other_has_it_twice(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = FakeSession(), FakeSession(), FakeSession()
    builder, envs = await make_group(module, monkeypatch, *sessions)
    totals = []
    for env, turns in zip(envs, (TURNS, 1, 0), strict=True):
        await env.initial_observation()
        totals.append(sum([(await env.step([7, STOP])).reward for _ in range(turns)]))
    rewards = await builder.compute_group_rewards([None] * 3, envs)
    assert [total + reward for total, (reward, _) in zip(totals, rewards, strict=True)] == [1.75, 1.25, 0.0]
    await builder.cleanup()
    assert [session.closed for session in sessions] == [1, 1, 1]


async def test_environments_of_a_group_are_released_side_by_side(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    closing, both = [], anyio.Event()

    class WaitingSession(FakeSession):
        async def close(self) -> None:
            closing.append(self)
            if len(closing) == 2:
                both.set()
            await both.wait()

    builder, envs = await make_group(module, monkeypatch, WaitingSession(), WaitingSession())
    for env in envs:
        await env.initial_observation()
    ended = False
    async with anyio.create_task_group() as group:
        group.start_soon(builder.cleanup)
        with anyio.move_on_after(5):
            await both.wait()
            ended = True
        both.set()
    assert ended
