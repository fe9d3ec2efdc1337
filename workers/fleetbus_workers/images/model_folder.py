"""Detects a model that sees from the configuration in its folder alone, so that a command can ask at once."""

import json
from pathlib import Path


def has_vision(folder: Path) -> bool:
    """True if a model folder's configuration has a vision tower; a folder that cannot be read has none."""
    try:
        configuration = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(configuration, dict) and isinstance(configuration.get("vision_config"), dict)
