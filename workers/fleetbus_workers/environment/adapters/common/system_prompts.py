"""The system message of an environment with tools, in the style that a run chose. Pure, but for today's date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING

from fleetbus.core.text.prompts import build_compact_system_prompt, build_fleet_system_prompt
from fleetbus_schemas import Task, ToolSpec

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle


def build_system_prompt(
    style: PromptStyle, tools: Sequence[ToolSpec], task: Task, today: Callable[[], date] = date.today
) -> str:
    """The message for ``tools``; empty where there are none, and where the model's own template describes them."""
    if not tools or style == "template":
        return ""
    if style == "compact":
        return build_compact_system_prompt(tools)
    return build_fleet_system_prompt(tools, today=today(), env_variables=task.env_variables, modality=task.modality)
