"""OpenRLHF's samples: what its engine leaves out of a turn's text is not added a second time. OpenRLHF itself is played by
tests/clients/test_trainers.py; here its base classes are stand-ins.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from fleetbus.client.blocking import SharedClient
from fleetbus_schemas import Task
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from tests.unit.test_sampled_episode import FakeClient, FakeSession

MODULE = "fleetbus_workers.trainers.openrlhf"
STARTER = Path(__file__).parents[2] / "workers/fleetbus_workers/starter/policy"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    base = ModuleType("openrlhf.utils.agent")
    base.__dict__.update(AgentInstanceBase=object, MultiTurnAgentExecutor=object)
    for name in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)


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
