"""All that `fleetbus agents` and the documentation say of agents is what a test or a benchmark shows."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.agent_training import CLIENTS
from fleetbus_workers.cli.look.agents import command
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.known import KNOWN_AGENTS, format_rows
from fleetbus_workers.environment.adapters.agent.tried import format_left_rows, format_tried_rows, load_tried
from tests.agents.client_agents import AGENTS
from tests.agents.shipped_agent import AGENTS as SHIPPED
from tests.agents.tried.catalogue import SHIPPED as SHIPPED_AS_IS

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
    names = [agent.name for agent in KNOWN_AGENTS] + [agent.name for agent in load_tried()]
    assert [agent["name"] for agent in listed] == names


def test_the_documentation_shows_the_agents_that_were_played_as_shipped() -> None:
    for rows in (format_tried_rows(), format_left_rows()):
        assert "\n".join(rows) in PAGE.read_text(), "print them anew: format_tried_rows(), format_left_rows()"


def test_every_agent_that_is_tried_has_a_row_of_what_it_showed() -> None:
    """The rows are what `just test-agents` wrote; of the others it is said why they do not play."""
    tried = {agent.name: agent for agent in load_tried()}
    assert sorted(tried) == sorted(agent.name for agent in SHIPPED_AS_IS)
    for agent in SHIPPED_AS_IS:
        row = tried[agent.name]
        assert row.install.endswith(" ".join(agent.packages)) and row.date and row.version
        assert row.plays or row.reason, agent.name
        assert not row.plays or (row.dialects and row.kills), agent.name
