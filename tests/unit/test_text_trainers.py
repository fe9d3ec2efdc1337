"""Trainers that exchange texts, ms-swift and ART: their rows are complete or refused. They themselves are played by
tests/clients/test_trainers.py; here their classes are stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from fleetbus.client.blocking import SharedClient
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded
from tests.support.trainer_stand_ins import load_adapter
from tests.unit.test_sampled_episode import FakeClient, FakeSession


class NoAnswer(Exception):
    """Stands in for the errors of the openai package."""


class Trajectory(SimpleNamespace):
    def messages(self) -> list[Any]:
        return [*self.messages_and_choices]

    def finish(self) -> Trajectory:
        return self


def load_ms_swift(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    class Env:
        def __init__(self, env_config: dict[str, Any]) -> None:
            self.env_config = env_config

    return load_adapter(monkeypatch, "ms_swift", {"swift.rollout.gym_env": {"Env": Env, "envs": {}}})


@pytest.mark.parametrize("missing", ["max_turns", "task_key"])
async def test_a_row_of_ms_swift_without_its_bound_or_its_task_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    module = load_ms_swift(monkeypatch)
    given = {"tasks": "tasks.json", "task_key": "t", "max_turns": 3}
    del given[missing]
    with pytest.raises(UserError, match=f"env_config lacks {missing}"):
        await module.FleetbusEnv(given).reset(None)


@pytest.mark.parametrize("fault", [{"unpaid": None}, {"fails": 1}])
async def test_an_episode_of_ms_swift_that_fails_releases_its_environment(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    module, session = load_ms_swift(monkeypatch), FakeSession(**fault)
    monkeypatch.setattr(module.EpisodeSource, "open", lambda *_, **__: open_texts(session))
    env = module.FleetbusEnv({"tasks": "tasks.json", "task_key": "t", "max_turns": 3})
    assert await env.reset(None) == ("go", {}, "")
    with pytest.raises(EpisodeExcluded):
        for _ in range(3):
            await env.step([{"role": "assistant", "content": "left"}])
    assert session.closed == 1


def load_art(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def build_trajectory(**fields: Any) -> Trajectory:
        return Trajectory(metrics={}, **fields)

    art = {"Trajectory": build_trajectory, "TrajectoryGroup": list}
    return load_adapter(monkeypatch, "art", {"art": art, "openai": {"OpenAIError": NoAnswer}})


def build_model(create: Callable[..., Any]) -> Any:
    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    return SimpleNamespace(openai_client=lambda: client, get_inference_name=lambda: "m")


def open_texts(*sessions: FakeSession) -> EpisodeSource:
    client = cast("SharedClient", FakeClient(*sessions))
    return EpisodeSource(client=client, tasks={"t": Task(key="t")})


async def test_an_episode_whose_model_does_not_answer_is_an_exception_of_arts_group_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, calls = load_art(monkeypatch), []

    async def create(**_: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise NoAnswer("503")
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="left"))])

    sessions = FakeSession(), FakeSession()
    group = await module.play_group(open_texts(*sessions), "t", build_model(create), group_size=2)
    assert sorted(type(each).__name__ for each in group) == ["NoAnswer", "Trajectory"]
    assert [each.reward for each in group if isinstance(each, Trajectory)] == [1.75]
    assert [session.closed for session in sessions] == [1, 1]


async def test_an_error_ends_all_episodes_of_arts_group_and_releases_their_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, waiting = load_art(monkeypatch), anyio.Event()

    async def create(messages: list[Any], **_: Any) -> Any:
        if waiting.is_set():
            raise ValueError("a fault of the program")
        waiting.set()
        await anyio.sleep_forever()

    sessions = FakeSession(), FakeSession()
    with pytest.raises(ValueError, match="a fault of the program"), anyio.fail_after(5):
        await module.play_group(open_texts(*sessions), "t", build_model(create), group_size=2)
    assert [session.closed for session in sessions] == [1, 1]
