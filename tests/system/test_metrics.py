"""``fleetbus metrics``: what a fleet does is exported under its names, to Prometheus and to other sinks."""

from __future__ import annotations

import io
import json
import math
import re
import runpy
import urllib.request
from pathlib import Path

import anyio
import pytest
import trio.testing
from rich.console import Console

from fleetbus.errors import UserError
from fleetbus_schemas import CheckpointStored, EngineLoad, LineageStarted, StepTrained, Task
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.observe.metrics import collect as collect_module
from fleetbus_workers.observe.metrics import numbers as numbers_module
from fleetbus_workers.observe.metrics.collect import collect, iterate_step_values
from fleetbus_workers.observe.metrics.metric import Metric, Sample
from fleetbus_workers.observe.metrics.numbers import build_numbers
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.metrics.table import METRICS, METRICS_BY_NAME
from fleetbus_workers.observe.run.jetstream import ConsumerPending, ServerView
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.watchdog import Stall
from fleetbus_workers.observe.sinks.table import open_sinks
from fleetbus_workers.observe.top import view as view_module
from fleetbus_workers.observe.top.view import build_facts, screen
from tests.support.small_deployment import build_configuration, small_deployment

ROOT = Path(__file__).parents[2]
VIRTUAL = pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}), id="virtual time")]
)


class Telling(ScriptedSampler):
    engine_load = EngineLoad(running=4, waiting=2, kv_cache_use=0.5, preemptions=3)


async def collect_samples() -> tuple[list[Sample], RunState]:
    async with small_deployment(build_configuration()) as fleet, anyio.create_task_group() as group:
        state = RunState(steps=1)
        watch = RunObserver(fleet.bus, fleet.subjects, state)
        group.start_soon(watch.run)
        fleet.environment("env")
        fleet.inference("inf", sampler=Telling())
        for number in range(3):
            await fleet.request(f"e{number}", task=Task(key="t", env="north"))
        await fleet.all_results(3)
        metrics = {
            "reward": 1.0,
            "staleness_max": 1.0,
            "seconds_wait": 3.0,
            "seconds_train": 1.0,
            "success": 0.5,
            "kl": math.nan,
        }
        await fleet.stored(fleet.subjects.train("default"), LineageStarted(lineage="l1", worker="learner"))
        step = StepTrained(lineage="l1", step=1, version=1, episodes=("e0", "e1"), metrics=metrics)
        await fleet.stored(fleet.subjects.train("default"), step)
        stored = CheckpointStored(lineage="l1", step=1, version=1, file="f", floor=1)
        await fleet.stored(fleet.subjects.train("default"), stored)
        await anyio.sleep(5)
        view = ServerView(consumers=(ConsumerPending(kind="obs", pending=4, redelivered=1),), slow_consumers=2)
        stall = Stall(where="learner", reason="r", seconds=9.0, advice="a")
        found = collect(RunView(state, watch.health, view, [stall, stall], now=anyio.current_time(), now_ns=fleet.bus.now_ns()))
        group.cancel_scope.cancel()
    return found, state


@VIRTUAL
async def test_what_a_fleet_did_is_exported_under_declared_names() -> None:
    found, _ = await collect_samples()
    values = {(sample.name, *sample.labels): sample.value for sample in found}
    assert {sample.name for sample in found} <= set(METRICS_BY_NAME)
    assert all(len(sample.labels) == len(METRICS_BY_NAME[sample.name].labels) for sample in found)
    assert len(values) == len(found), "a sample came twice"
    assert values["fleetbus_episodes_total", "completed"] == 3
    assert values["fleetbus_reward_quantile", "north", "0.9"] == 1.0
    assert values["fleetbus_step",] == 1 and values["fleetbus_trainer_idle_ratio",] == 0.75
    assert values["fleetbus_staleness_steps", "max"] == 1
    assert values["fleetbus_workers", "environment", "working"] == 1
    assert values["fleetbus_worker_slots", "inf", "inference"] == 16
    assert values["fleetbus_worker_counter_total", "env", "environment", "episodes"] == 3
    assert [values["fleetbus_engine_requests", "inf", state] for state in ("running", "waiting")] == [4, 2]
    assert values["fleetbus_engine_kv_cache_ratio", "inf"] == 0.5 and values["fleetbus_engine_preemptions_total", "inf"] == 3
    assert values["fleetbus_log_pending", "obs"] == 4 and values["fleetbus_nats_slow_consumers",] == 2
    assert values["fleetbus_stalled", "learner"] == 1
    assert ("fleetbus_train_metric", "kl") not in values, "what is no number is left out"


@VIRTUAL
async def test_prometheus_gets_them_over_http() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from fleetbus_workers.observe.metrics.exposition import Exposition, serve_metrics

    found, _ = await collect_samples()
    exposition = Exposition("my-run")
    with serve_metrics(exposition, "127.0.0.1", 0) as port:
        exposition.update(found)
        text = scrape(port)
        with pytest.raises(UserError, match="cannot be served"), serve_metrics(exposition, "127.0.0.1", port):
            raise AssertionError
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["fleetbus_step"].samples[0].labels == {"run": "my-run"}
    assert families["fleetbus_episodes"].type == "counter"
    assert sum(len(family.samples) for family in families.values()) == len(found)


def scrape(port: int) -> str:
    """What Prometheus would get."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


@VIRTUAL
async def test_every_step_is_written_to_the_sinks_once(tmp_path: Path) -> None:
    _, state = await collect_samples()
    file, written = tmp_path / "metrics.jsonl", set[tuple[str, int]]()
    with open_sinks(run="r", jsonl=file) as sinks:
        for _ in range(2):
            for step, seconds, values in iterate_step_values(state, written):
                sinks.write(step, seconds, {**values, "broken": math.nan})
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["step"] == 1 and line["success"] == 0.5 and line["version"] == 1.0 and "broken" not in line


def test_a_sink_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"), open_sinks(run="r", jsonl=tmp_path / "no" / "file"):
        raise AssertionError


def test_a_row_of_the_table_says_all_that_is_shown_of_its_metric() -> None:
    suffixes = {"s": "_seconds", "bytes": "_bytes", "ratio": "_ratio", "1/s": "_per_second"}
    numbers = build_numbers(RunView(RunState(1)))
    for metric in METRICS:
        first = METRICS_BY_NAME[metric.name]
        assert (metric.kind, metric.help, metric.labels) == (first.kind, first.help, first.labels), "one family"
        assert metric.name.endswith(suffixes.get(metric.unit, "")) and metric.help, metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        if metric.page or metric.top:
            shown = EngineLoad.__struct_fields__ if metric.page == "engine" else numbers
            assert metric.key in shown, metric.name
        assert not metric.page or metric.title, metric.name
        assert not metric.top or metric.text, metric.name
    keys = [metric.key for metric in METRICS if metric.key and metric.page != "engine"]
    assert len(set(keys)) == len(keys)


def test_a_new_row_is_exported_and_shown_without_another_change(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Metric(
        name="fleetbus_new_ratio", help="New", unit="ratio", read=lambda view: 0.25, key="new", page="run", title="new things",
        top="learning", text="new things {}", panel="Errors: New things",
    )  # fmt: skip
    for module in (collect_module, numbers_module, view_module):
        monkeypatch.setattr(module, "METRICS", (*METRICS, row))
    view = RunView(RunState(1))
    assert Sample("fleetbus_new_ratio", 0.25) in collect(view)
    assert build_numbers(view)["new"] == 0.25
    console = Console(width=80, file=io.StringIO())
    console.print(screen(build_facts(view, run="r")))
    assert "new things 25%" in console.file.getvalue()  # type: ignore[attr-defined]
    assert row.describe_card()["title"] == "new things"


def test_the_dashboard_is_what_the_table_says() -> None:
    build = runpy.run_path(str(ROOT / "docs" / "grafana" / "build.py"))
    assert (ROOT / "docs" / "grafana" / "fleetbus.json").read_text() == build["render"](), "run docs/grafana/build.py"


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "fleetbus.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = {name for expression in expressions for name in re.findall(r"fleetbus_\w+", expression)}
    assert asked <= set(METRICS_BY_NAME) and len(asked) > 25
    for expression in expressions:
        for name, selectors in re.findall(r"(fleetbus_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=~?", selectors)) <= {"run", *METRICS_BY_NAME[name].labels}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
