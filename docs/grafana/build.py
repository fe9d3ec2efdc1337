"""Write ``fleetbus.json``, the dashboard for Grafana, from the table of metrics: ``python docs/grafana/build.py``.

A metric with a ``panel`` gets its place by itself; `COMPOSED` are the panels that compute with several or choose among labels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetbus_workers.observe.metrics.metric import Metric
from fleetbus_workers.observe.metrics.table import METRICS

FILE = Path(__file__).with_name("fleetbus.json")
ROWS = ("Progress", "Throughput", "Staleness and stability", "Errors", "Fleet", "Engines", "Log")
RUN = 'run=~"$run"'
UNITS = {"ratio": "percentunit", "s": "s", "bytes": "bytes"}
WIDTH, HEIGHT = 6, 7


def stage_count(prefix: str) -> str:
    counters = f'fleetbus_worker_counter_total{{{RUN},name=~"{prefix}_.*"}}'
    return f'sum by (stage) (label_replace({counters}, "stage", "$1", "name", "{prefix}_(.*)"))'


COMPOSED = {
    "Staleness and stability: Entropy, KL, gradient norm": (
        f'fleetbus_train_metric{{{RUN},name=~"entropy|kl|grad_norm|clip_fraction"}}', "{{name}}", "none"
    ),
    "Staleness and stability: Ratio": (
        f'fleetbus_train_metric{{{RUN},name=~"ratio_.*|logprob_difference_max"}}', "{{name}}", "none"
    ),
    "Fleet: In flight of slots": (
        f"fleetbus_worker_in_flight{{{RUN}}} / fleetbus_worker_slots{{{RUN}}}", "{{worker}}", "percentunit"
    ),
    "Fleet: Worst silence": (f"max by (role) (fleetbus_worker_silent_seconds{{{RUN}}})", "{{role}}", "s"),
    "Log: Unread bytes by connection": (f"fleetbus_nats_pending_bytes{{{RUN}}} > 0", "{{worker}}", "bytes"),
    "Fleet: Episodes in a stage now": (f"{stage_count('begun')} - {stage_count('ended')}", "{{stage}}", "none"),
}  # fmt: skip


def build_dashboard() -> dict[str, Any]:
    return {
        "title": "fleetbus",
        "uid": "fleetbus",
        "schemaVersion": 39,
        "version": 2,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["fleetbus"],
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, _build_run_choice()]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(_place_panels(), start=1)],
    }


def _build_run_choice() -> dict[str, Any]:
    query = {"query": "label_values(fleetbus_step, run)", "refId": "run"}
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "name": "run", "type": "query", "datasource": source, "query": query, "includeAll": True, "multi": True, "refresh": 2,
    }  # fmt: skip


def _place_panels() -> Iterator[dict[str, Any]]:
    """Row by row, four panels beside each other."""
    panels, y = _collect_panels(), 0
    for row in ROWS:
        yield {
            "type": "row", "title": row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "collapsed": False, "panels": [],
        }  # fmt: skip
        shown = {name.removeprefix(f"{row}: "): panel for name, panel in panels.items() if name.startswith(f"{row}: ")}
        for index, (title, (targets, unit)) in enumerate(shown.items()):
            place = {"h": HEIGHT, "w": WIDTH, "x": WIDTH * (index % 4), "y": y + 1 + HEIGHT * (index // 4)}
            yield _build_panel(title, targets, unit, place)
        y += 1 + HEIGHT * -(-len(shown) // 4)


def _collect_panels() -> dict[str, tuple[list[tuple[str, str]], str]]:
    """Expressions with their legends, and the unit, by ``Row: Title``."""
    shared: dict[str, dict[str, Metric]] = {}
    for metric in METRICS:
        if metric.panel:
            shared.setdefault(metric.panel, {})[metric.name] = metric
    found = {
        name: ([_build_target(name, metric, is_alone=len(metrics) == 1) for metric in metrics.values()], _choose_unit(metrics))
        for name, metrics in shared.items()
    }
    return found | {name: ([(expression, legend)], unit) for name, (expression, legend, unit) in COMPOSED.items()}


def _build_target(panel: str, metric: Metric, *, is_alone: bool) -> tuple[str, str]:
    expression = f"{metric.name}{{{RUN}}}"
    labels = [f"{{{{{label}}}}}" for label in metric.labels]
    legend = " ".join(labels or ["{{run}}"]) if is_alone else " ".join(["{{__name__}}", *labels])
    return (f"rate({expression}[1m]) * 60" if panel.endswith("per minute") else expression), legend


def _choose_unit(metrics: dict[str, Metric]) -> str:
    return UNITS.get(next(iter(metrics.values())).unit, "none")


def _build_panel(title: str, targets: list[tuple[str, str]], unit: str, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(targets)
        ],
    }


def render() -> str:
    return json.dumps(build_dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())
