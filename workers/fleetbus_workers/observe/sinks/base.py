"""The interface of a sink, which keeps a run's metrics, and the names that dashboards group.

A sink gets flat names and finite numbers per training step and per evaluation. JSON lines keep the names; TensorBoard and W&B
get them in groups, because they show a section per prefix. A sink is a class of `table.SINKS`, made with what the user wrote
and a `SinkTarget`; its library is imported when it is made, and only writes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fleetbus_workers.observe.run.formatting import STAGE_PREFIX, STALENESS_PREFIX


class SinkTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The run that is kept; ``configuration`` are its settings by name (``learner.steps``), without secrets; ``folder`` is the
    run's, which may not exist."""

    run: str
    configuration: Mapping[str, Any] = {}
    folder: Path | None = None


class Sink(Protocol):
    """Blocking; called from one thread, in the order of steps."""

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        """Keep the values of one step, or of the ``evaluation`` of that name; ``time_seconds`` is Unix time."""

    def close(self) -> None:
        """Everything is on its way when this returns."""


def group_names(values: Mapping[str, float], evaluation: str = "") -> dict[str, float]:
    """Values under the names that dashboards group: ``train/reward``, ``time/wait``, ``staleness/max``; of an evaluation
    ``eval/success``, and ``eval_greedy/success`` if its policy was greedy."""
    if evaluation:
        prefix = "eval_greedy" if evaluation.endswith("_greedy") else "eval"
        return {f"{prefix}/{name}": value for name, value in values.items()}
    return {_group_name(name): value for name, value in values.items()}


def _group_name(name: str) -> str:
    for prefix, group in ((STAGE_PREFIX, "time"), (STALENESS_PREFIX, "staleness")):
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    return f"train/{name}"
