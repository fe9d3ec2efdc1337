"""Executes an agent as it is shipped on the task's prompt: ``python shipped_agent.py NAME PROGRAM``, behind ``agent:``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def claude_code(prompt: str) -> list[str]:
    return ["-p", prompt, "--model", "policy", "--permission-mode", "bypassPermissions"]


def codex(prompt: str) -> list[str]:
    """Its own sandbox is off, for it stands in one; the provider is the endpoint."""
    url = os.environ["OPENAI_BASE_URL"]
    provider = f'{{name="policy", base_url="{url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = ("model_provider=policy", f"model_providers.policy={provider}")
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy"]
    return ["exec", *flags, *(word for setting in settings for word in ("-c", setting)), prompt]


AGENTS: dict[str, Callable[[str], list[str]]] = {"claude_code_streamed": claude_code, "codex_streamed": codex}


def main() -> None:
    prompt = json.loads(Path(os.environ["FLEETBUS_TASK_FILE"]).read_text())["prompt"]
    program = sys.argv[2]
    os.execv(program, [program, *AGENTS[sys.argv[1]](prompt)])


if __name__ == "__main__":
    main()
