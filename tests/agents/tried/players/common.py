"""The things that all players have in common: the prompt, a tool of the agent's own, the command of the server with another."""

from __future__ import annotations

import json
import os
import sys

PROMPT = sys.argv[1] if len(sys.argv) > 1 else ""
URL, KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
COMMAND, *ARGUMENTS = json.loads(os.environ.get("LOOK_SERVER", '[""]'))


def look(at: int) -> str:
    """Looks at a place and says what is there.

    Args:
        at: The number of the place.
    """
    return f"look-{10 * at}"
