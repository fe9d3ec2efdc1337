"""The row of an agent: read from its two episodes, one of them disturbed by kills, and from what went over the wire."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from fleetbus_schemas import EpisodeFinished
from fleetbus_workers.environment.adapters.agent.tried import FILE, TriedAgent
from tests.agents.tried.catalogue import Shipped

DIALECTS = {
    "chat/completions": "chat completions",
    "responses": "responses",
    "messages": "messages",
    "generateContent": "gemini",
    "streamGenerateContent": "gemini",
}

ELSEWHERE = ("sub_agents", "images", "repairs")
"""What `test_shipped_agents` shows of some."""


class Played(msgspec.Struct, kw_only=True):
    """One episode: ``turns`` as the trajectory shows them, ``trained`` of them by a learner, ``said`` is what the agent
    printed, ``paths`` what it asked, ``answered`` statuses and whether as a stream, ``probes`` how often it only asked
    for a head."""

    result: EpisodeFinished | None
    trained: int
    turns: list[dict[str, Any]]
    said: str
    status: int
    paths: list[str]
    answered: list[tuple[int, bool]]
    balanced: bool
    probes: int = 0

    @property
    def right(self) -> bool:
        """True if the agent got its answer and said it."""
        return self.result is not None and self.result.outcome == "completed" and self.result.reward == 1.0

    def list_untrained(self, reason: str) -> set[int]:
        """Turns that are not trained for this reason."""
        return set() if self.result is None else {each.turn for each in self.result.untrained if each.reason == reason}

    @property
    def results(self) -> list[list[str]]:
        """The texts that tools gave, by call of the model's."""
        return [[str(each.get("content", "")) for each in turn["messages"] if each["role"] == "tool"] for turn in self.turns]


def describe(agent: Shipped, version: str, calm: Played, disturbed: Played | None) -> TriedAgent:
    """The row of an agent that played."""
    told = [
        text
        for turn in calm.turns
        for each in turn["messages"]
        if each["role"] != "system"
        for text in [str(each.get("content", ""))]
    ]
    info = calm.result.info if calm.result is not None else {}
    sides = int(info.get("side_calls", 0))
    follow = max(0, len(calm.turns) - sides - 1)
    return TriedAgent(
        name=agent.name,
        version=version,
        install=f"{agent.by} install {' '.join(agent.packages)}",
        date=datetime.now(UTC).date().isoformat(),
        dialects=sorted({spoken for path in calm.paths if (spoken := find_dialect(path))}),
        plays=calm.right,
        own_tools=any("look-" in text for text in told),
        mcp=any("peek-30" in text for text in told),
        parallel=any(len([each for each in results if "-10" in each or "-20" in each]) > 1 for results in calm.results),
        streams=any(stream for _, stream in calm.answered),
        calls=len(calm.turns),
        trained=calm.trained,
        side_calls=sides,
        extending=int(info.get("calls_extending", 0)),
        following=follow,
        segments=dict(info.get("segments_begun", {})),
        refused=sorted(set(list_refused(calm))),
        kills=explain_kills(calm, disturbed),
        needed=agent.needed,
        reason="" if calm.right else f"it ended with {calm.status}: {read_last_line(calm.said)}",
    )


def read_last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def list_refused(played: Played) -> list[int]:
    """Statuses of calls that were refused; a probe that only asks for a head, as Claude Code's, is none."""
    refused = [status for status, _ in played.answered if status >= 400]
    for _ in range(min(played.probes, refused.count(404))):
        refused.remove(404)
    return refused


def find_dialect(path: str) -> str:
    ends = path.partition("?")[0]
    return next((name for end, name in DIALECTS.items() if ends.endswith(("/" + end, ":" + end))), "")


def explain_kills(calm: Played, disturbed: Played | None) -> str:
    """`survives` if all was sampled once and delivered once; else what came of it."""
    if disturbed is None:
        return ""
    lost = len(disturbed.list_untrained("not_delivered") - calm.list_untrained("side_call"))
    more = max(0, len(disturbed.turns) - len(calm.turns))
    if disturbed.right and not more and not lost:
        return "survives"
    return f"{'gets on' if disturbed.right else 'ends'}: {more} more sampled, {lost} not delivered and not trained"


def write_tried(tried: TriedAgent) -> None:
    """Put one agent's row in the place of the one that it had; what another test shows of it stays."""
    before = read_rows().get(tried.name)
    kept = {name: getattr(before, name) for name in ELSEWHERE} if before else {}
    write_row(msgspec.structs.replace(tried, **kept))


def write_shown(name: str, **shown: object) -> None:
    """Add to an agent's row what another test shows, the `ELSEWHERE`."""
    assert shown.keys() <= set(ELSEWHERE)
    write_row(msgspec.structs.replace(read_rows()[name], **shown))


def read_rows() -> dict[str, TriedAgent]:
    return {each.name: each for each in msgspec.json.decode(FILE.read_bytes(), type=list[TriedAgent])}


def write_row(row: TriedAgent) -> None:
    known = read_rows() | {row.name: row}
    FILE.write_text("[\n" + ",\n".join(msgspec.json.encode(known[name]).decode() for name in sorted(known)) + "\n]\n")
