"""Grading by a verifier of a test: the limits of its code, what it may ask for, and a verdict in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits

LIMITS = VerifierLimits(seconds=30.0, cpu_seconds=1, memory_bytes=512 << 20)
CONVERSATION = [{"role": "user", "content": "What is é?"}]


class Tools:
    """What the code may ask for; `hang` until cancelled, `fail` with an error."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.hanging = anyio.Event()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self.asked.append((name, arguments))
        if name == "hang":
            self.hanging.set()
            await anyio.sleep_forever()
        if name == "fail":
            raise LookupError("no such thing")
        return {"name": name, **arguments}

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self.asked.append((sql, params))
        return [[82]]


async def grade(
    verifier: Verifier, code: str, *, answer: str | None = "82", tools: Tools | None = None
) -> tuple[float | None, str]:
    with anyio.fail_after(45):
        verdict = await verifier.verify(code, final_answer=answer, conversation=CONVERSATION, tools=tools or Tools())
    return verdict.reward, verdict.reason
