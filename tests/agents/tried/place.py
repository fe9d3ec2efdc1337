"""The place of an agent as shipped: its environment, a home of its own, the variables that point it to the gateway."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

LOOK_SERVER = Path(__file__).with_name("look_server.py")
PLAYERS = Path(__file__).with_name("players")
SERVER_NAME = "places"
PASSED = ("LANG", "LC_ALL", "TERM", "TMPDIR", "SSL_CERT_FILE", "PIP_CERT", "PIP_INDEX_URL", "UV_DEFAULT_INDEX")


class Place:
    """``folder`` holds the agent's packages, ``home`` is its HOME with ``work`` as the working folder. ``variables`` may be
    added to."""

    def __init__(self, folder: Path, home: Path, session: dict[str, Any], prompt: str) -> None:
        self.folder, self.home, self.session, self.prompt = folder, home, session, prompt
        self.work = home / "work"
        self.work.mkdir(parents=True)
        self.variables = {name: os.environ[name] for name in PASSED if name in os.environ} | {
            "HOME": str(home),
            "PATH": f"{folder}/bin:{folder}/node_modules/.bin:{find_node(folder.parent)}:/usr/local/bin:/usr/bin:/bin",
            "OPENAI_BASE_URL": session["openai_base_url"],
            "OPENAI_API_BASE": session["openai_base_url"],
            "OPENAI_API_KEY": session["key"],
            "ANTHROPIC_BASE_URL": session["anthropic_base_url"],
            "ANTHROPIC_API_KEY": session["key"],
            "GOOGLE_GEMINI_BASE_URL": session["gemini_base_url"],
            "GEMINI_API_KEY": session["key"],
            "LOOK_SERVER": json.dumps(self.look_server),
        }

    @property
    def look_server(self) -> list[str]:
        """The command of the server with the tool `peek`."""
        return [sys.executable, "-I", "-S", str(LOOK_SERVER)]

    @property
    def served(self) -> dict[str, Any]:
        """The same as most agents want it in their settings."""
        command, *arguments = self.look_server
        return {SERVER_NAME: {"command": command, "args": arguments}}

    def write(self, name: str, content: object) -> Path:
        """A file of the home, as it is or as JSON."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def find(self, pattern: str) -> str:
        """A file of the agent's packages."""
        found = sorted(self.folder.glob(pattern))
        assert found, f"{self.folder} has no {pattern}"
        return str(found[0])

    def python(self, player: str) -> list[str]:
        """A player of this folder, with the agent's own Python."""
        return [str(self.folder / "bin" / "python"), str(PLAYERS / player), self.prompt]

    def node(self, player: str) -> list[str]:
        """The same for one in JavaScript; packages are looked for beside it, so it is copied there."""
        copied = self.folder / player
        text = (PLAYERS / player).read_text()
        if not copied.exists() or copied.read_text() != text:  # many may be started at once
            copied.write_text(text)
        return ["node", str(copied), self.prompt]


def find_node(folder: Path) -> Path:
    """The path that holds Node, beside the environments."""
    return folder / "node" / "only"
