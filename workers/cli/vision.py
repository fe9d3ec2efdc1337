"""Tasks that show images, refused by name before they start where the engine reads text only."""

from __future__ import annotations

from collections.abc import Iterable

from fleetbus.errors import UserError
from schemas import Task

ENGINES_WITH_VISION: frozenset[str] = frozenset()
"""None yet: no engine is handed pixels."""

IMAGE_MODALITIES = frozenset({"computer_use", "browser_use"})
"""Task modalities whose observations are screenshots."""

NAMED = 3


def check_vision(engine: str, tasks: Iterable[Task]) -> None:
    """Raise `UserError` naming tasks that show images if ``engine`` cannot see them."""
    shown = [f"{task.key} ({task.modality})" for task in tasks if task.modality in IMAGE_MODALITIES]
    if not shown or engine in ENGINES_WITH_VISION:
        return
    names = ", ".join(shown[:NAMED]) + (f" and {len(shown) - NAMED} more" if len(shown) > NAMED else "")
    raise UserError(
        f"the engine {engine} reads text only, and these tasks show images: {names}; "
        "leave them out: fleetbus tasks split --modality tool_use"
    )
