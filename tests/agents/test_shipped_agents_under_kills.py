"""64 agents of five kinds as they are shipped, at once, while a worker that serves them is killed every five seconds: ``just
agent-kills``. Needs the environments of `just test-agents`; ``MINUTES`` is for how long, one by default."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest

from fleetbus.audit.run import audit_run
from tests.agents.tried.catalogue import SHIPPED
from tests.agents.tried.crowd import INFERENCE_WORKERS, Crowd, Listening, kill_in_turn, read_books
from tests.agents.tried.stage import SUBJECTS, running
from tests.support.processes import children

ENVIRONMENTS = Path(os.environ.get("AGENTS_ENVIRONMENTS") or "/nonexistent").resolve()
MINUTES = float(os.environ.get("MINUTES") or 1)
SHARE = float(os.environ.get("SHARE") or 1)
"""Of the 64 agents, for a machine with little memory."""

PAUSE = 5.0
KINDS = {"claude-code": 5, "codex": 14, "gemini-cli": 3, "ai-sdk-compatible": 24, "openai-agents": 18}
"""How many of each: 64. The large programs are few, for they hold 300 MB each."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not ENVIRONMENTS.is_dir(), reason="AGENTS_ENVIRONMENTS names no folder: `just test-agents`"),
]


async def watch_memory(found: list[int]) -> None:
    """What this process and all below it hold, in MiB, a shared page once."""
    own = psutil.Process()
    while True:
        held = 0
        for each in [own, *own.children(recursive=True)]:
            with suppress(psutil.Error):
                held += each.memory_full_info().pss
            await anyio.sleep(0.05)
        found.append(held >> 20)


async def test_no_call_is_sampled_twice_and_nothing_unseen_is_trained_while_shipped_agents_play(tmp_path: Path) -> None:
    agents = {each.name: each for each in SHIPPED}
    held: list[int] = []
    async with running(tmp_path, "marked", Listening) as stage:
        for place in range(INFERENCE_WORKERS):
            stage.start_inference("disturbed", place)  # which takes its time, so that kills come in mid-answer
        crowd = Crowd(stage, ENVIRONMENTS, tmp_path)
        async with anyio.create_task_group() as outer:
            outer.start_soon(watch_memory, held)
            async with anyio.create_task_group() as group:
                for name, count in KINDS.items():
                    for number in range(max(1, round(count * SHARE))):
                        group.start_soon(crowd.play, agents[name], number)
                kills = await kill_in_turn(stage, MINUTES * 60, PAUSE)
                crowd.close()
            outer.cancel_scope.cancel()
        report = await audit_run(stage.bus, SUBJECTS)
        books = await read_books(stage, crowd.asked)
    print(f"{kills} kills, {len(crowd.asked)} episodes, most held {max(held)} MiB", dict(crowd.ended), books, sep="\n")
    print(*crowd.complaints.items(), sep="\n")
    assert report.balanced, report.findings
    assert not books.unseen, "trained, and no agent saw it"
    assert not books.twice, "sampled twice"
    assert not books.missing and len(crowd.asked) == sum(books.outcomes.values()), "an episode is lost"
    assert books.taken_over and books.trained
    assert not children()
