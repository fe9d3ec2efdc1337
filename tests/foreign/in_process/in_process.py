"""A harness of verifiers v1 that asks the policy from the package's own process, as the package's contract allows.

Its own `null` starts an interpreter for each turn, a second of a core: hundreds of games would take an hour of two cores.
"""

from __future__ import annotations

from typing import Any

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult


class InProcessConfig(HarnessConfig):
    pass


class InProcessHarness(Harness[InProcessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        async with httpx.AsyncClient(verify=False, timeout=None) as client:
            response = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"authorization": f"Bearer {secret}"},
            )
        response.raise_for_status()
        return ProgramResult(0, "", "")


__all__ = ["InProcessHarness"]
