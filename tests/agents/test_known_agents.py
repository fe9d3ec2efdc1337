"""All that `fleetbus agents` and the documentation say of agents is what a test or a benchmark shows."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.agent_training import CLIENTS
from fleetbus_workers.cli.look.agents import command
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.known import KNOWN_AGENTS, format_rows
from tests.agents.client_agents import AGENTS
from tests.agents.shipped_agent import AGENTS as SHIPPED

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


def test_every_known_agent_is_tried_by_a_test_and_every_tried_client_is_known() -> None:
    cases = [case for agent in KNOWN_AGENTS for case in agent.cases]
    assert sorted(cases) == sorted([*AGENTS, *SHIPPED, "mini_swe_agent"])
    assert Path(__file__).with_name("test_mini_swe_agent.py").is_file()
    spoken = {dialect for agent in KNOWN_AGENTS for dialect in agent.dialects}
    assert {name.replace(" ", "_") for name in spoken} == {
        str(vars(each)["__name__"]).rpartition(".")[2] for each in DIALECTS.values()
    }
    assert {agent.name.replace("-", "_") for agent in KNOWN_AGENTS if agent.trains} == set(CLIENTS)


def test_the_documentation_shows_the_known_agents() -> None:
    assert "\n".join(format_rows()) in PAGE.read_text(), "print them anew: format_rows()"


def test_they_are_listed_as_text_and_as_json() -> None:
    assert "smolagents" in CliRunner().invoke(command, [], standalone_mode=False).output
    listed = json.loads(CliRunner().invoke(command, ["--json"], standalone_mode=False).output)
    assert [agent["name"] for agent in listed] == [agent.name for agent in KNOWN_AGENTS]
