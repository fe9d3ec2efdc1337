"""Agents as they are shipped play multi-turn episodes through the gateway, with kills: `just test-agents`.

What each shows is written into ``tried_agents.json``, which `fleetbus agents` lists and `docs/agents.md` shows.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agents.tried.catalogue import SHIPPED, Shipped
from tests.agents.tried.install import find_version
from tests.agents.tried.outcome import Played, describe, write_tried
from tests.agents.tried.play import play
from tests.agents.tried.stage import running

ENVIRONMENTS = Path(os.environ.get("AGENTS_ENVIRONMENTS") or "/nonexistent")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ENVIRONMENTS.is_dir(), reason="AGENTS_ENVIRONMENTS names no folder: `just test-agents`"),
]


@pytest.mark.parametrize("agent", [pytest.param(each, id=each.name) for each in SHIPPED])
async def test_an_agent_as_shipped_plays_and_what_it_shows_is_written_down(agent: Shipped, tmp_path: Path) -> None:
    folder = ENVIRONMENTS / agent.place
    if not folder.is_dir():
        pytest.skip(f"{agent.name} is not installed")
    async with running(tmp_path, agent.policy) as stage:
        calm = await play(stage, agent, folder, tmp_path, "calm")
        show(calm)
        disturbed = None
        if calm.right:
            stage.start_inference("disturbed")
            disturbed = await play(stage, agent, folder, tmp_path, "disturbed")
            show(disturbed)
    row = describe(agent, find_version(agent, folder), calm, disturbed)
    print(row)
    write_tried(row)
    assert calm.right, calm.said
    for each in (calm, disturbed):
        assert each is not None and each.balanced


def show(played: Played) -> None:
    """For the log of a test that fails."""
    print(played.said, f"status {played.status}", played.paths, played.answered, sep="\n")
    for turn in played.turns:
        told = [(each["role"], str(each.get("content", ""))[-300:]) for each in turn["messages"]]
        print(turn["segment"], turn["origin"], len(turn["tools"]), told, "->", turn["text"])
    if (result := played.result) is not None:
        print(result.outcome, result.reward, result.error, result.info, result.untrained)
