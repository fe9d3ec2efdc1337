"""A verdict is the total of its episode: what the steps were not rewarded of it comes with the last one, and nothing twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.client.sessions import sessions
from fleetbus.client.skyrl import FleetbusEnv
from fleetbus.core.algorithms.turn_credit import compute_turn_returns, unpaid_reward
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.colours import ColoursEnvironment
from fleetbus_workers.environment.base import Step
from tests.support.gateway_processes import RUN, start_processes
from tests.support.gym_service import Handler, serve_gym
from tests.support.openenv_gateway import gateway
from tests.support.paying import PAYMENTS, PayingEnvironment, gym_gateway, paying_configuration
from tests.support.small_deployment import small_deployment

ways = pytest.mark.parametrize(("rewards", "verdict", "told"), PAYMENTS.values(), ids=PAYMENTS.keys())


@ways
async def test_through_a_session(rewards: list[float], verdict: float, told: list[float]) -> None:
    async with small_deployment(paying_configuration()) as fleet, sessions(fleet.bus, fleet.subjects) as client:
        fleet.environment("e1", make=PayingEnvironment)
        async with client.open(Task(key="t", config={"rewards": rewards, "verdict": verdict})) as session:
            for _ in range(2):  # a second episode of the same session owes nothing to the first
                await session.reset()
                assert [(await session.step("x")).reward for _ in rewards] == rewards
                answer = await session.verify()
                assert (answer.reward, answer.unpaid) == (verdict, pytest.approx(told[-1] - rewards[-1]))


@ways
async def test_through_the_remote_gym_gateway(rewards: list[float], verdict: float, told: list[float]) -> None:
    async with small_deployment(paying_configuration()) as fleet, gym_gateway(fleet) as wire:
        fleet.environment("e1", make=PayingEnvironment)
        session = (await wire.connect({"rewards": rewards, "verdict": verdict}))["session_id"]
        for _ in range(2):
            assert [(await wire.call(session, "step", action_str="x"))["reward"] for _ in rewards] == told
            await wire.call(session, "reset", seed=2)
        await wire.call(session, "close")


@ways
async def test_through_the_openenv_gateway(rewards: list[float], verdict: float, told: list[float]) -> None:
    async with gateway(make=PayingEnvironment) as here, here.socket() as socket:
        for _ in range(2):
            await socket.ask("reset", rewards=rewards, verdict=verdict)
            assert [(await socket.ask("step", text="x"))["data"]["reward"] for _ in rewards] == told


@pytest.mark.integration
async def test_through_skyrl(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    described = [{"key": key, "rewards": rewards, "verdict": verdict} for key, (rewards, verdict, _) in PAYMENTS.items()]
    tasks.write_text(json.dumps([{"prompt": "p", "env_key": "e"} | each for each in described]))
    async with start_processes(tmp_path / "store") as fleet:
        await fleet.start("e1", "environment", "--environment", "tests.support.paying:PayingEnvironment")
        for key, (rewards, verdict, told) in PAYMENTS.items():
            environment = FleetbusEnv(
                {"nats_url": fleet.url, "run": RUN, "tasks_file": str(tasks), "timeout": 20}, {"task_key": key}
            )
            await environment.init_async([])
            assert [(await environment.step_async("x"))["reward"] for _ in rewards] == told
            assert environment.get_metrics()["final_reward"] == verdict
            await environment.close_async()


@ways
def test_in_the_credit_of_turns(rewards: list[float], verdict: float, told: list[float]) -> None:
    returns = compute_turn_returns(rewards, unpaid_reward(verdict, rewards), turns=len(rewards), discount=1.0)
    assert returns == pytest.approx([sum(told[turn:]) for turn in range(len(told))])


async def test_through_a_service_around_one_s_own_environments() -> None:
    async with serve_gym(Handler()) as wire:
        session = (await wire.connect({"goal": 3}))["session_id"]
        told = [await wire.call(session, "step", action_str="x") for _ in range(3)]
    assert [(each["reward"], each["done"]) for each in told] == [(0.5, False), (0.5, False), (0.5, True)]


async def test_sums_in_another_order_leave_nothing_to_pay() -> None:
    rewards = [0.1, 0.2, 0.3]
    assert sum(rewards) != 0.6
    assert unpaid_reward(sum(rewards), rewards) == unpaid_reward(0.6, rewards) == 0.0


async def test_a_verdict_that_does_not_come_is_no_reward_even_where_steps_were_paid() -> None:
    config: dict[str, Any] = {"rewards": [0.5, 0.5], "verdict": None}
    async with small_deployment(paying_configuration()) as fleet, gym_gateway(fleet) as wire:
        fleet.environment("e1", make=PayingEnvironment)
        session = (await wire.connect(config))["session_id"]
        await wire.call(session, "step", action_str="x")
        last = await wire.call(session, "step", action_str="x")
        assert (last["done"], last["info"]["training_usable"]) == (True, False)
        await wire.call(session, "close")


async def test_a_reward_that_is_none_is_null_with_a_reason_through_the_openenv_gateway() -> None:
    class Silent(PayingEnvironment):
        def __init__(self, verdict: float | None) -> None:
            self._rewards, self._verdict, self._count = [0.0, 0.0], verdict, 0

        async def open(self, task: Task) -> None: ...

        async def step(self, action: Action) -> Step:
            return msgspec.structs.replace(await super().step(action), unrewarded="sent as null")

    for verdict, said in ((math.nan, "the verdict is nan"), (math.inf, "the verdict is inf"), (None, "as the task says")):
        async with gateway(make=lambda v=verdict: Silent(v)) as here, here.socket() as socket:
            await socket.ask("reset")
            told = [(await socket.ask("step", text="x"))["data"] for _ in range(2)]
        assert [(each["reward"], each["done"]) for each in told] == [(None, False), (None, True)]
        assert told[0]["metadata"]["reward_reason"] == "sent as null" and said in told[1]["metadata"]["reward_reason"]


async def test_the_turns_of_the_picture_environment_are_paid_their_share_of_its_verdict() -> None:
    environment = ColoursEnvironment(4)
    await environment.open(Task(key="c", seed=3))
    await environment.reset()
    paid = []
    for turn in range(4):
        answer = (await environment.state())["answer"]
        paid.append((await environment.step(Action(episode_id="e", attempt=1, turn=turn, text=answer))).reward)
    assert (await environment.verify()).reward == sum(paid) == 1.0
