"""The screen of ``fleetbus top``, 80 columns wide, from the fold of a run. Pure: rich only draws it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fleetbus.config.settings import ADMISSION_SHARE
from fleetbus_workers.observe.metrics.numbers import build_numbers
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.metrics.table import METRICS
from fleetbus_workers.observe.run.formatting import format_bytes, format_duration, in_flight
from fleetbus_workers.observe.run.jetstream import ServerView
from fleetbus_workers.observe.run.pools import PoolRow
from fleetbus_workers.observe.run.versions import describe_versions
from fleetbus_workers.observe.run.watchdog import find_notes
from fleetbus_workers.observe.run.worker_registry import WorkerRow

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.table import Table

SHOWN_WORKERS = 24
"""Where the height of the terminal does not say how many there is room for."""

LEAST_WORKERS = 3
BETWEEN = " · "
SHOWN_CLASSES = 5
SHOWN_SLOW = 3
SHOWN_POOLS = 6
SHOWN_POLICIES = 4
SHOWN_OPERATIONS = 3
SLOW_BYTES = 256 << 10
"""Less than this is unread for a moment everywhere."""

NAME_WIDTH = 30
_URGENT = {"failed": 0, "silent": 1, "draining": 2, "starting": 3}
_STYLES = {"silent": "bold red", "failed": "bold red", "stopped": "dim", "draining": "yellow", "starting": "yellow"}


def build_facts(view: RunView, *, run: str, admission: float = ADMISSION_SHARE) -> dict[str, Any]:
    """Everything that is shown, as plain data: what ``--json`` prints."""
    health = view.health
    return {
        "run": run,
        "ending": view.termination,
        "numbers": build_numbers(view),
        "step": view.step,
        "workers": view.workers,
        "seat_policies": view.seat_policies,
        "versions": describe_versions(view.state.worker_registry.list_live(view.now)),
        "pools": view.pools,
        "log": {
            "bytes": health.bytes,
            "limit_bytes": health.limit_bytes,
            "admission": admission,
            "last_sequence": health.last_sequence,
            "counted_from": health.counted_from,
            "older_read": health.older_read,
            "entries_per_second": round(health.entries_per_second, 1),
            "problem": health.problem,
        },
        "server": view.server,
        "operations": view.state.operations.newest,
        "stalls": list(view.stalls),
        "notes": [] if view.termination else find_notes(view.state, now_ns=view.now_ns),
    }


def screen(shown: dict[str, Any], console: Console | None = None) -> Group:
    """The facts as rows of text and one table, with as many workers as fit the height of ``console``, if it is given."""
    from rich.console import Group
    from rich.text import Text

    numbers, step = shown["numbers"], shown["step"]
    is_over = shown["ending"] is not None
    lines: list[RenderableType] = [
        _Row(_format_headline(shown), "bold"),
        _Row(_format_learning(numbers, step)),
        _Row(_format_episodes(numbers, is_over)),
    ]
    policies = shown["seat_policies"]
    lines += [_Row(row.describe(is_over=is_over)) for row in policies[:SHOWN_POLICIES]]
    lines += [_Row([f"{len(policies) - SHOWN_POLICIES} more policies of seats"])] * (len(policies) > SHOWN_POLICIES)
    if not is_over and len(shown["pools"]) > 1:
        lines.append(_Row(_format_pools(shown["pools"])))
    lines += [_Row(_format_log(shown["log"], shown["server"], is_over), _choose_log_style(shown["log"], is_over))]
    if not (is_over and shown["log"]["problem"]):  # what was known of a server that is gone
        lines += _render_server(shown["server"])
    if not is_over and (engines := _format_engines(shown["workers"])):
        lines.append(_Row(engines))
    if wrong := _format_metrics("problems", numbers):
        lines.append(_Row(wrong, "yellow"))
    if not is_over and shown["versions"]:
        lines.append(Text(shown["versions"], style="yellow"))
    if shown.get("is_behind"):
        lines.append(Text("the log is still being read: these numbers are those of earlier", style="bold yellow"))
    if older := _format_older(shown["log"]):
        lines.append(_Row(older, "yellow"))
    if is_over:
        lines.append(Text(shown["ending"].line, style="bold"))
    lines += [Text(" ".join(stall.line.split()), style="bold red") for stall in shown["stalls"]]
    lines += [Text(note, style="green") for note in shown["notes"]]
    lines += [Text(each.line, style="dim") for each in shown["operations"][-SHOWN_OPERATIONS:]]
    room = SHOWN_WORKERS
    if console is not None:
        room = max(console.height - len(console.render_lines(Group(*lines), pad=False)) - 2, LEAST_WORKERS)
    if not shown["workers"]:
        return Group(*lines, Text("no worker any more" if is_over else "no heartbeat received yet", style="dim"))
    return Group(*lines, *_render_workers(shown["workers"], room))


class _Row:
    """Parts of a line with dots between them; where the line is too long it is broken at a dot, never within a part, even at
    line breaks that the part has."""

    def __init__(self, parts: Sequence[str], style: str = "") -> None:
        self._parts = parts
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        line = ""
        for part in (" ".join(part.split()) for part in self._parts):
            if line and len(line) + len(BETWEEN) + len(part) > options.max_width:
                yield Text(line, style=self._style)
                line = "  "
            line += (BETWEEN if line.strip() else "") + part
        yield Text(line, style=self._style)


def _format_headline(shown: dict[str, Any]) -> list[str]:
    numbers = shown["numbers"]
    state = (
        "finished"
        if numbers["finished"]
        else f"over, step {numbers['step']}"
        if shown["ending"] is not None
        else f"step {numbers['step']}" + (f"/{numbers['steps']}" if numbers["steps"] > numbers["step"] else "")
    )
    return [f"run {shown['run']}", state, *_format_metrics("headline", numbers)]


def _format_learning(numbers: dict[str, Any], step: dict[str, float]) -> list[str]:
    parts = _format_metrics("learning", numbers) or ["reward -"]
    if "staleness_mean" in step:
        parts.append(f"staleness {step['staleness_mean']:.1f} (max {step.get('staleness_max', 0):.0f})")
    for name, label in (("seconds_wait", "wait"), ("seconds_train", "train"), ("entropy", "entropy")):
        if name in step:
            parts.append(f"{label} {step[name]:.2f}{' s' if name.startswith('seconds') else ''}")
    return parts


def _format_episodes(numbers: dict[str, Any], is_over: bool) -> list[str]:
    oldest = [f"oldest open {format_duration(numbers['oldest_open_seconds'])}"] if numbers["oldest_open_seconds"] else []
    finished, running, waiting = (numbers[name] for name in ("finished_episodes", "running", "waiting"))
    if is_over:
        left = f"{running:,} cut short, {waiting:,} not started"
        return [f"episodes {finished:,} finished", *([left] if running or waiting else [])]
    return [f"episodes {finished:,} finished", f"{running:,} running", f"{waiting:,} waiting", *oldest]


def _format_pools(pools: Sequence[PoolRow]) -> list[str]:
    """The pools with the most waiting episodes first."""
    shown = sorted(pools, key=lambda row: (-row.waiting, row.pool))[:SHOWN_POOLS]
    parts = [f"{row.pool} {row.waiting:,} waiting, {row.free:,} of {row.slots:,} slots free" for row in shown]
    more = [f"{len(pools) - len(shown)} more"] if len(pools) > len(shown) else []
    return [f"pools: {parts[0]}", *parts[1:], *more]


def _format_engines(workers: Sequence[WorkerRow]) -> list[str]:
    """The load of the engines of all inference workers together; of shares the largest and the least."""
    loads = [row.engine for row in workers if row.engine is not None]
    told = {metric: [getattr(load, metric.key) for load in loads] for metric in METRICS if metric.top == "engines"}
    known = {metric: [value for value in values if value is not None] for metric, values in told.items()}
    parts = [metric.format(metric.combine(values)) for metric, values in known.items() if values]
    return [f"engines: {parts[0]}", *parts[1:]] if parts else []


def _format_log(log: dict[str, Any], server: ServerView, is_over: bool) -> list[str]:
    if log["problem"]:
        return [f"log {format_bytes(log['bytes'])}", "no longer served"] if is_over else [f"log: {log['problem']}"]
    share = f" of {format_bytes(log['limit_bytes'])}" if log["limit_bytes"] else ""
    parts = [f"log {format_bytes(log['bytes'])}{share}", f"{log['entries_per_second']:.0f} entries/s"]
    if server.consumers:
        parts += [f"pending {server.pending:,}", f"redelivered {server.redelivered:,}"]
    if server.oldest:
        parts.append(f"oldest entry of {server.oldest[11:19]}")
    return parts


def _format_older(log: dict[str, Any]) -> list[str]:
    """From where on numbers count, while what is older is being read."""
    start = log["counted_from"]
    if start <= 1:
        return []
    share = log["older_read"] / log["last_sequence"] if log["last_sequence"] else 0.0
    return [
        f"counts begin at entry {start:,}",
        f"all of the log is being read: {min(share, 1.0):.0%}",
        "stalls are not looked for yet",
    ]


def _choose_log_style(log: dict[str, Any], is_over: bool) -> str:
    if log["problem"]:
        return "dim" if is_over else "bold red"
    return "yellow" if log["limit_bytes"] and log["bytes"] > log["admission"] * log["limit_bytes"] else ""


def _render_server(server: ServerView) -> list[RenderableType]:
    """The NATS server in one line, slow consumers in another."""
    if server.hint:
        return [_Row([server.hint], "dim")]
    parts = [f"nats {server.version} up {server.uptime}"] if server.version else []
    if server.connections is not None:
        parts.append(f"{server.connections} connections")
    if server.memory_bytes:
        parts.append(f"{format_bytes(server.memory_bytes)} of memory")
    if server.slow_consumers is not None:
        parts.append(f"slow consumers {server.slow_consumers}")
    unread = [each for each in server.clients if each.pending_bytes >= SLOW_BYTES]
    slow = [f"{each.worker} has {format_bytes(each.pending_bytes)} unread" for each in unread[:SHOWN_SLOW]]
    slow += [f"{each.worker} was disconnected at {each.at[11:19]}" for each in server.cut[-SHOWN_SLOW:]]
    lines: list[RenderableType] = [_Row(parts)] if parts else []
    lines += [_Row([problem], "yellow") for problem in server.problems]
    return lines + ([_Row(slow, "yellow")] if slow else [])


def _format_metrics(line: str, numbers: dict[str, Any]) -> list[str]:
    """The metrics of a line of which something is known; of problems those that there are."""
    parts = []
    for metric in METRICS:
        value = numbers[metric.key] if metric.top == line else None
        if isinstance(value, dict):
            parts += _format_counts(metric.text, value)
        elif value or (value is not None and line != "problems"):
            parts.append(metric.format(value))
    return parts


def _format_counts(title: str, found: dict[str, int]) -> list[str]:
    """The most frequent ones, the title before the first."""
    counted = [f"{name} {count}" for name, count in sorted(found.items(), key=lambda each: -each[1]) if count]
    return [f"{title}: {counted[0]}", *counted[1:SHOWN_CLASSES]] if counted else []


def _render_workers(workers: Sequence[WorkerRow], room: int) -> list[RenderableType]:
    """Failed and silent workers first if there is no room for all; the rest are counted."""

    if len(workers) <= room:
        return [_build_table(workers)]
    urgent = sorted(workers, key=lambda row: (_URGENT.get(row.state, len(_URGENT)), row.role != "learner"))
    chosen = {row.worker for row in urgent[: room - 1]}
    hidden = Counter((row.role, row.state) for row in workers if row.worker not in chosen)
    counted = [f"{count} {role} {state}" for (role, state), count in sorted(hidden.items())]
    return [_build_table([row for row in workers if row.worker in chosen]), _Row([f"and {counted[0]}", *counted[1:]], "dim")]


def _build_table(workers: Sequence[WorkerRow]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("in flight", "version", "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in workers:
        style = _STYLES.get(row.state, "")
        held = in_flight(row.role, row.in_flight, row.slots)
        if row.share is not None:  # the worker serves other runs too
            held += f", others {row.share.used_by_others}, of {row.share.slots}"
        version = str(row.policy_version) if row.policy_version >= 0 else ""
        table.add_row(
            row.worker, row.role, Text(row.state, style=style), held, version, f"{row.seconds:.0f} s ago", style=style
        )
    return table
