"""The files that an agent may see are listed beside the event loop: folders that Python imports from may be large."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fleetbus_workers.environment.adapters.agent import host as agent_host
from fleetbus_workers.environment.adapters.agent.host import AgentHost


class Started(Exception):
    """As far as this goes."""


async def test_the_event_loop_lists_no_files_for_an_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed: dict[str, int] = {}
    confined: list[Any] = []

    def list_visible(*_: object) -> list[Path]:
        listed["visible"] = threading.get_ident()
        return [Path("/seen")]

    def list_hidden(visible: object, _: object) -> list[Path]:
        assert visible == [Path("/seen")]
        listed["hidden"] = threading.get_ident()
        return [Path("/seen/secret")]

    async def start_in_sandbox(*arguments: object) -> None:
        confined.append(arguments[-1])
        raise Started

    monkeypatch.setattr(agent_host, "find_agent_isolation", lambda policy: "bubblewrap")
    monkeypatch.setattr(agent_host, "give_tree", lambda *_: None)
    monkeypatch.setattr(agent_host, "list_visible", list_visible)
    monkeypatch.setattr(agent_host, "list_hidden", list_hidden)
    monkeypatch.setattr(agent_host, "start_in_sandbox", start_in_sandbox)
    host = AgentHost(["agent"], policy="auto", passed=())
    with pytest.raises(Started):
        await host._start(tmp_path, {}, {})
    assert listed.keys() == {"visible", "hidden"}
    assert threading.get_ident() not in listed.values()
    assert confined[0].visible[0] == Path("/seen") and confined[0].hidden == (Path("/seen/secret"),)
