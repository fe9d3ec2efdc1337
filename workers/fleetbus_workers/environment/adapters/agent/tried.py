"""Agents that were played as they are shipped, as data that `just test-agents` writes: ``tried_agents.json`` beside this file.

Each played two episodes of a run through ``fleetbus gateway agents`` with a scripted policy: in the second the inference worker
was killed in the middle of one answer and the gateway in the middle of another.
"""

from functools import cache
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("tried_agents.json")


class TriedAgent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one agent showed. ``following`` are its calls but the first and those beside its task, ``extending`` those of them
    that continued the token path; ``refused`` are statuses of calls that were refused; ``kills`` what became of the disturbed
    episode. ``reason``: why it was not played; nothing else but name, install and date is known of it then."""

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
    calls: int = 0
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
