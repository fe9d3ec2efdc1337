"""The alert rules name metrics that are exported, with labels that they have and values that occur, and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from fleetbus_schemas import Outcome, WorkerRole
from fleetbus_workers.cli.program import COMMANDS
from fleetbus_workers.observe.metrics.table import METRICS
from fleetbus_workers.observe.run.worker_registry import State

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
VALUES: dict[str, tuple[str, ...]] = {"outcome": get_args(Outcome), "state": get_args(State), "role": get_args(WorkerRole)}
SELECTOR = re.compile(r"(fleetbus_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*=~?\s*"([^"]*)"')

by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


@by_rule
def test_a_rule_selects_what_is_exported(rule: dict[str, Any]) -> None:
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    selected = SELECTOR.findall(rule["expr"])
    assert selected
    for name, matchers in selected:
        assert name in labels
        for label, values in MATCHER.findall(matchers):
            assert label in labels[name]
            assert set(values.split("|")) <= set(VALUES[label])


@by_rule
def test_a_rule_is_grouped_by_labels_of_its_metric(rule: dict[str, Any]) -> None:
    labels = {
        label
        for name, _ in SELECTOR.findall(rule["expr"])
        for metric in METRICS
        if metric.name == name
        for label in metric.labels
    }
    named = re.findall(r"by \((\w+)\)", rule["expr"]) + re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    assert set(named) <= labels


@by_rule
def test_a_rule_parses_as_a_query(rule: dict[str, Any]) -> None:
    pytest.importorskip("promql_parser").parse(rule["expr"])


@by_rule
def test_a_rule_says_how_bad_it_is_and_what_to_do_first(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    description = rule["annotations"]["description"]
    assert set(re.findall(r"`fleetbus (\w+)", description)) <= set(COMMANDS)
    for file in re.findall(r"docs/[\w/-]+\.md", description):
        assert (ROOT / file).is_file()


def test_no_two_rules_have_one_name() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
