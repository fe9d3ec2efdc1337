"""Defines a metric: one row that the exporter, the page, `top` and the dashboard read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.formatting import format_bytes, format_count, format_duration

Unit = Literal["", "s", "bytes", "ratio", "1/s"]
Reading = float | None | Mapping[Any, float]
"""One value, or one for each value of the label, or of several labels as a tuple; None is unknown."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. ``name`` is its Prometheus name: never changed, only added; the unit stands last in it (``_seconds``,
    ``_bytes``, ``_ratio``), counters end in ``_total`` and only grow while the exporter lives. ``labels`` are the names of its
    labels, besides ``run``, which all have.

    ``key`` is its field in the ``numbers`` of `top --json` and of the page; of an engine's metric its field of `EngineLoad`.
    ``page`` names the page's section with a card for it, called ``title``, with ``digits`` after the point; one that ``warns``
    is coloured unless 0, an ``optional`` one has no card while it is unknown. ``top`` names its line in `top`, ``text`` what
    that says: ``{}`` is replaced by the value with its unit, ``{:.2f}`` by the number. ``panel`` is its place on the dashboard,
    ``Row: Title``, which several may share; a counter's is its rate if the title ends in "per minute". ``combine`` makes one
    value of those of several engines.
    """

    name: str
    help: str
    read: Callable[[RunView], Reading]
    kind: Literal["gauge", "counter"] = "gauge"
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    key: str = ""
    page: Literal["", "run", "log", "engine"] = ""
    title: str = ""
    digits: int = 0
    warns: bool = False
    optional: bool = False
    top: Literal["", "headline", "learning", "engines", "problems"] = ""
    text: str = ""
    panel: str = ""
    combine: Callable[[list[float]], float] = sum

    def format(self, value: float) -> str:
        """The part of a line of `top` that shows the value."""
        return self.text.format(_format_value(value, self.unit) if "{}" in self.text else value)

    def describe_card(self) -> dict[str, Any]:
        """The fields that the page shows it by."""
        return {name: getattr(self, name) for name in ("key", "page", "title", "unit", "digits", "warns", "optional")}


class Sample(msgspec.Struct, frozen=True):
    """One value of a metric; ``labels`` in the order of `Metric.labels`."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def _format_value(value: float, unit: Unit) -> str:
    match unit:
        case "s":
            return format_duration(value)
        case "bytes":
            return format_bytes(value)
        case "ratio":
            return f"{value:.0%}"
        case _:
            return format_count(value)
