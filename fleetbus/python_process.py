"""Command lines of Python processes that fleetbus starts, so that the working folder never shadows what they import."""

from __future__ import annotations

import sys


def build_module_command(module: str, *arguments: str) -> list[str]:
    """This interpreter running ``module``. ``-P`` keeps the working folder off the import path: a user's ``random.py`` or
    ``mcp/`` there must not replace the real one. Modules that a user names are looked up in that folder by
    `fleetbus.user_code.load_callable`, after everything that is installed."""
    return [sys.executable, "-P", "-m", module, *arguments]
