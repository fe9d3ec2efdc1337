"""From a run at one moment to samples under their Prometheus names, and to the values that sinks keep. Pure."""

from collections.abc import Iterable, Mapping

from fleetbus_workers.observe.metrics.metric import Sample
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.metrics.table import METRICS
from fleetbus_workers.observe.run.state import RunState


def collect(view: RunView) -> list[Sample]:
    """All samples; what is unknown has none."""
    samples = []
    for metric in METRICS:
        found = metric.read(view)
        for labels, value in (found if isinstance(found, Mapping) else {(): found}).items():
            if value is not None:
                samples.append(Sample(metric.name, float(value), (labels,) if isinstance(labels, str) else labels))
    return samples


def iterate_evaluation_values(
    state: RunState, written: set[tuple[str, str]]
) -> Iterable[tuple[int, float, dict[str, float], str]]:
    """Step, Unix time, results and name of the surviving lineages' evaluations that are not ``written`` yet, and are from now
    on. ``written`` are lineages and names. One without any grade has no results."""
    for point in state.training.evaluations:
        if (point.lineage, point.name) not in written:
            written.add((point.lineage, point.name))
            if point.graded:
                values = {"success": point.success, "mean_reward": point.mean_reward, "graded": float(point.graded)}
                yield point.step, point.time_ns / 1e9, values, point.name


def iterate_step_values(state: RunState, written: set[tuple[str, int]]) -> Iterable[tuple[int, float, dict[str, float]]]:
    """Step, Unix time and metrics of the surviving lineage's steps that are not ``written`` yet, and are from now on.

    ``written`` are lineages and steps: what a later lineage trains again is another step of the same number.
    """
    for point in state.training.steps:
        if (point.lineage, point.step) not in written:
            written.add((point.lineage, point.step))
            yield point.step, point.time_ns / 1e9, point.metrics | {"version": float(point.version)}
