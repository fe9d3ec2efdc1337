"""Agents that were played as they are shipped, as data that `just test-agents` writes: ``tried_agents.json`` beside this file.

Each played two episodes of a run through ``fleetbus gateway agents`` with a scripted policy: in the second the inference worker
was killed in the middle of one answer and the gateway in the middle of another.
"""

from functools import cache
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("tried_agents.json")
SHOWN = {
    "own tools": "own_tools",
    "MCP": "mcp",
    "side by side": "parallel",
    "streamed": "streams",
    "sub-agents": "sub_agents",
    "images": "images",
}
"""Fields of `TriedAgent`, by what they are called."""

REPAIRS = 5


class TriedAgent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The things that one agent showed. ``trained`` are the calls whose tokens a learner trains, all but those beside its task;
    ``following`` its calls but the first and those beside its task, ``extending`` those of them that continued the token
    path; ``refused`` are statuses of calls that were refused; ``kills`` what became of the disturbed episode. ``reason``: why
    it did not play to its end. ``images``: it goes on after one that its own tool gave. ``repairs``: how many repositories
    it repaired as `agent:SPEC` in the default sandbox, of five."""

    name: str
    install: str
    date: str
    version: str = ""
    dialects: list[str] = []
    plays: bool = False
    own_tools: bool = False
    mcp: bool = False
    parallel: bool = False
    streams: bool = False
    sub_agents: bool = False
    images: bool = False
    repairs: int = 0
    calls: int = 0
    trained: int = 0
    side_calls: int = 0
    extending: int = 0
    following: int = 0
    segments: dict[str, int] = {}
    refused: list[int] = []
    kills: str = ""
    needed: str = ""
    reason: str = ""


@cache
def load_tried() -> tuple[TriedAgent, ...]:
    """By name."""
    return msgspec.json.decode(FILE.read_bytes(), type=tuple[TriedAgent, ...])


def format_tried_rows() -> list[str]:
    """The table of `docs/agents.md`."""
    names = (
        "agent",
        "version",
        "speaks",
        *SHOWN,
        "on one path",
        "trained",
        "kills in mid-answer",
        "repairs in the sandbox",
        "what was needed",
        "tried",
    )
    head = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return head + [f"| {' | '.join(_list_cells(agent))} |" for agent in load_tried() if agent.plays]


def format_left_rows() -> list[str]:
    """Those that were not played to their end, and why."""
    return [
        f"- {agent.name} {agent.version} (`{agent.install}`): {agent.extending} of {agent.following} on one path, "
        f"then {agent.reason}"
        for agent in load_tried()
        if not agent.plays
    ]


def _list_cells(agent: TriedAgent) -> tuple[str, ...]:
    return (
        agent.name,
        agent.version,
        ", ".join(agent.dialects),
        *("yes" if getattr(agent, field) else "not shown" for field in SHOWN.values()),
        f"{agent.extending} of {agent.following}" + (f", {agent.side_calls} beside" if agent.side_calls else ""),
        f"{agent.trained} of {agent.calls}",
        agent.kills,
        f"{agent.repairs} of {REPAIRS}" if agent.repairs else "not tried",
        agent.needed or "nothing",
        agent.date,
    )
