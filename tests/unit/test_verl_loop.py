"""Rows for verl. verl itself is played by tests/clients/test_trainers.py; here its base class is a stand-in."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.inference.scripted import STOP
from tests.support.trainer_stand_ins import load_adapter
from tests.unit.test_sampled_episode import FakeSession, open_source


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    members = {"AgentLoopBase": object, "AgentLoopOutput": SimpleNamespace}
    return load_adapter(monkeypatch, "verl", {"verl.experimental.agent_loop.agent_loop": members})


class Servers:
    """Sample a turn of two ids, each with weights that are a step newer."""

    step = 0

    async def generate(self, **_: Any) -> SimpleNamespace:
        self.step += 1
        fields = {"min_global_steps": self.step, "max_global_steps": self.step}
        return SimpleNamespace(token_ids=[7, STOP], log_probs=[-0.5, -0.25], num_preempted=None, extra_fields=fields)


def build(module: ModuleType, *sessions: FakeSession, prompt_length: int) -> Any:
    loop = module.FleetbusAgentLoop.__new__(module.FleetbusAgentLoop)
    loop._source, _ = open_source(*sessions)
    loop._length, loop._longest, loop.server_manager = 64, prompt_length, Servers()
    return loop


async def test_a_row_names_the_first_and_the_last_version_that_sampled_it(module: ModuleType) -> None:
    row = await build(module, FakeSession(), prompt_length=8).run({"logprobs": True}, task_key="t")
    assert (row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) == (1, 3)
    assert len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs) == 8


async def test_a_prompt_that_verl_has_no_room_for_is_refused_in_one_line(module: ModuleType) -> None:
    session = FakeSession()
    with pytest.raises(UserError, match=r"task t begins with 2 tokens, and data\.max_prompt_length is 1"):
        await build(module, session, prompt_length=1).run({}, task_key="t")
    assert session.closed == 1


async def test_a_row_that_names_no_task_is_refused_in_one_line(module: ModuleType) -> None:
    with pytest.raises(UserError, match="a row names no task: put a task_key"):
        await build(module, FakeSession(), prompt_length=8).run({}, extra_info={})
