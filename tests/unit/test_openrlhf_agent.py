"""OpenRLHF's samples: what its engine leaves out of a turn's text is not added a second time. OpenRLHF itself is played by
tests/clients/test_trainers.py; here its base classes are stand-ins.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from fleetbus.client.blocking import SharedClient
from fleetbus_schemas import Task
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from tests.support.trainer_stand_ins import load_adapter
from tests.unit.test_sampled_episode import FakeClient, FakeSession

STARTER = Path(__file__).parents[2] / "workers/fleetbus_workers/starter/policy"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    members = {"AgentInstanceBase": object, "MultiTurnAgentExecutor": object}
    return load_adapter(monkeypatch, "openrlhf", {"openrlhf.utils.agent": members})


@pytest.mark.parametrize("shown", ["", "end"])
async def test_a_turn_ends_once_in_the_sample_with_its_end_in_the_text_or_without(module: ModuleType, shown: str) -> None:
    template = ChatTemplate(STARTER)
    client = cast("SharedClient", FakeClient(session := FakeSession()))
    module._source.set(EpisodeSource(template=template, client=client, tasks={"t": Task(key="t")}))
    agent: Any = module.FleetbusAgent()
    await agent.reset({"label": "t", "observation": ""})
    end = template.decode([template.turn_end])
    told = await agent.step({"action_text": "left" + (end if shown else "")})
    assert session.texts == ["left"]
    assert template.encode("left" + end + told["environment_feedback"]).count(template.turn_end) == 2  # and the environment's
    assert not told["environment_feedback"].startswith(end)
