"""The plots of `all.py`: one SVG file per figure, drawn from its JSON with matplotlib (`fleetbus[plot]`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

_OURS, _OTHER = "#1b6ca8", "#999999"


def draw_plots(results: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Files by the title of their figure, for each whose benchmark has printed rows."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    files = {}
    for name, (benchmark, title, draw) in PLOTS.items():
        rows = results["benchmarks"].get(benchmark, {}).get("rows", [])
        if not rows:
            continue
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw(axes, rows)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(frameon=False, loc="outside lower center", ncols=3)
        folder.mkdir(parents=True, exist_ok=True)
        files[title] = folder / f"{name}.svg"
        figure.savefig(files[title], format="svg", metadata={"Date": None})
    return files


def draw_step_loop(axes: Any, rows: Rows) -> None:
    _draw_bars(axes, [str(row["sessions"]) for row in rows], rows, ours="steps_per_second", other="bare_steps_per_second")
    axes.set(xlabel="sessions", ylabel="steps per second")


def draw_latencies(axes: Any, rows: Rows) -> None:
    for row in rows:
        times = row["latency_ms_by_percentile"]
        axes.plot(list(times.values()), [float(share) for share in times], label=f"sessions: {row['sessions']}")
    axes.set(xscale="log", xlabel="ms from an environment's answer to its next action", ylabel="% of steps")


def draw_scaling(axes: Any, rows: Rows) -> None:
    processes = [row["processes"] for row in rows]
    axes.plot(processes, [row["ideal"] for row in rows], color=_OTHER, linestyle="--", label="what the waits allow")
    axes.plot(processes, [row["steps_per_second"] for row in rows], "o-", color=_OURS, label="measured")
    axes.set(xlabel="environment workers, and as many inference workers", ylabel="steps per second", xticks=processes)


def draw_recovery(axes: Any, rows: Rows) -> None:
    recovery = rows[-1]["recovery_seconds"]
    roles = [role for role in ("environment", "inference", "learner", "server") if recovery[role]["p50"] is not None]
    _draw_bars(axes, roles, [recovery[role] for role in roles], ours="p50", other="p99")
    axes.set(ylabel="seconds until its work continues elsewhere")


def draw_async(axes: Any, rows: Rows) -> None:
    _draw_bars(axes, [str(row["staleness"]) for row in rows], rows, ours="episodes_per_second", other="possible")
    axes.set(xlabel="staleness bound (0: synchronous)", ylabel="trained episodes per second")


def _draw_bars(axes: Any, places: Sequence[str], rows: Rows, *, ours: str, other: str) -> None:
    """A pair of bars at each place."""
    for field, shift, colour in ((ours, -0.2, _OURS), (other, 0.2, _OTHER)):
        axes.bar(
            [at + shift for at in range(len(places))], [row[field] for row in rows], 0.38, color=colour, label=_spell(field)
        )
    axes.set_xticks(range(len(places)), places)


def _spell(field: str) -> str:
    return {
        "bare_steps_per_second": "bare nats-py loop",
        "possible": "what the latencies allow",
        "p50": "median",
        "p99": "99 %",
    }.get(field, "fleetbus")


PLOTS: dict[str, tuple[str, str, Callable[[Any, Rows], None]]] = {
    "step_loop": ("step_loop", "Steps of episodes beside a bare loop", draw_step_loop),
    "latencies": ("step_loop", "Time of a step", draw_latencies),
    "scaling": ("scaling", "Worker processes that wait", draw_scaling),
    "recovery": ("chaos", "Recovery from kills", draw_recovery),
    "async_against_sync": ("async_against_sync", "Asynchronous over synchronous training", draw_async),
}
"""By name of the file: which benchmark, the title, and what draws it."""
