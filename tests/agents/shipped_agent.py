"""Executes an agent as it is shipped on a task: ``python shipped_agent.py NAME PROGRAM...``, behind ``agent:``.

The files of the task's config are laid out in the working folder first. Standard library alone: it runs in the sandbox.
"""

from __future__ import annotations

import base64
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


def gemini_cli(prompt: str) -> list[str]:
    """It asks for a way to sign in otherwise, and whether it may use a shell."""
    chosen = {"security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}}}
    lay_out({".gemini/settings.json": json.dumps(chosen)})
    return ["-p", prompt, "-m", "policy", "--yolo"]


AGENTS: dict[str, Callable[[str], list[str]]] = {
    "claude_code_streamed": claude_code,
    "codex_streamed": codex,
    "gemini_cli_streamed": gemini_cli,
}


def lay_out(files: dict[str, str]) -> None:
    """Texts by path; those of pictures in base64."""
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(base64.b64decode(content) if name.endswith(".png") else content.encode())


def main() -> None:
    task = json.loads(Path(os.environ["FLEETBUS_TASK_FILE"]).read_text())
    lay_out(task["config"].get("files", {}))
    os.environ["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    name, *program = sys.argv[1:]
    os.execv(program[0], [*program, *AGENTS[name](task["prompt"])])


if __name__ == "__main__":
    main()
