"""The screen of ``fleetbus top``, 80 columns wide, from the fold of a run. Pure: rich only draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workers.monitor.follow import LogHealth
from workers.monitor.roster import WorkerRow
from workers.monitor.state import FleetState
from workers.top.jetstream import ServerView
from workers.up.wording import duration, rounded
from workers.watchdog import Stall

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

SHOWN_WORKERS = 24
SHOWN_SLOW = 3
NAME_WIDTH = 30
_STYLES = {"silent": "bold red", "failed": "bold red", "stopped": "dim", "draining": "yellow", "starting": "yellow"}


def facts(
    state: FleetState, health: LogHealth, server: ServerView, stalls: Sequence[Stall], *, run: str, now: float, now_ns: int
) -> dict[str, Any]:
    """Everything that is shown, as plain data: what ``--json`` prints."""
    points = state.points()
    metrics = points[-1].metrics if points else {}
    return {
        "run": run,
        "numbers": state.numbers(now_ns),
        "step": metrics,
        "workers": state.workers(now),
        "log": {
            "bytes": health.bytes,
            "limit_bytes": health.limit_bytes,
            "last_sequence": health.last_sequence,
            "entries_per_second": round(health.entries_per_second, 1),
            "problem": health.problem,
        },
        "server": server,
        "stalls": list(stalls),
    }


def screen(shown: dict[str, Any]) -> Group:
    """The facts as rows of text and one table."""
    from rich.console import Group
    from rich.text import Text

    numbers, step = shown["numbers"], shown["step"]
    lines = [Text(_headline(shown), style="bold", no_wrap=True, overflow="ellipsis"), Text(_learning(numbers, step))]
    lines += [Text(_episodes(numbers)), Text(_log(shown["log"], shown["server"]))]
    lines += _server(shown["server"])
    wrong = _errors(numbers)
    if wrong:
        lines.append(Text(wrong, style="yellow"))
    lines += [Text(stall.line, style="bold red") for stall in shown["stalls"]]
    hidden = len(shown["workers"]) - SHOWN_WORKERS
    more = [Text(f"and {hidden} more workers", style="dim")] if hidden > 0 else []
    return Group(*lines, _table(shown["workers"][:SHOWN_WORKERS]), *more)


def _headline(shown: dict[str, Any]) -> str:
    numbers = shown["numbers"]
    state = (
        "finished"
        if numbers["finished"]
        else f"step {numbers['step']}" + (f"/{numbers['steps']}" if numbers["steps"] > numbers["step"] else "")
    )
    rates = f"{numbers['episodes_per_second']:.1f} episodes/s · {rounded(numbers['tokens_per_second'])} tokens/s"
    return f"run {shown['run']} · {state} · version {numbers['version']} · {rates}"


def _learning(numbers: dict[str, Any], step: dict[str, float]) -> str:
    parts = [f"reward {_number(numbers['reward'])}"]
    if "success" in step:
        parts.append(f"success {step['success']:.2f}")
    if "staleness_mean" in step:
        parts.append(f"staleness {step['staleness_mean']:.1f} (max {step.get('staleness_max', 0):.0f})")
    for name, label in (("seconds_wait", "wait"), ("seconds_train", "train"), ("entropy", "entropy")):
        if name in step:
            parts.append(f"{label} {step[name]:.2f}{' s' if name.startswith('seconds') else ''}")
    return " · ".join(parts)


def _episodes(numbers: dict[str, Any]) -> str:
    oldest = f", oldest open {duration(numbers['oldest_open_seconds'])}" if numbers["oldest_open_seconds"] else ""
    return (
        f"episodes {numbers['finished_episodes']:,} finished, {numbers['running']:,} running, "
        f"{numbers['waiting']:,} waiting{oldest}"
    )


def _log(log: dict[str, Any], server: ServerView) -> str:
    if log["problem"]:
        return f"log: {log['problem']}"
    share = f" of {log['limit_bytes'] / 1e9:.1f} GB" if log["limit_bytes"] else ""
    parts = [f"log {log['bytes'] / 1e6:.1f} MB{share}", f"{log['entries_per_second']:.0f} entries/s"]
    if server.consumers:
        parts += [f"pending {server.pending:,}", f"redelivered {server.redelivered:,}"]
    if server.oldest:
        parts.append(f"since {server.oldest[11:19]}")
    return " · ".join(parts)


def _server(server: ServerView) -> list[Text]:
    """The NATS server in a line, who does not read what it asked for in another."""
    from rich.text import Text

    if server.hint:
        return [Text(server.hint, style="dim")]
    parts = [f"nats {server.version} up {server.uptime}"] if server.version else []
    if server.connections is not None:
        parts.append(f"{server.connections} connections")
    if server.memory_bytes:
        parts.append(f"{server.memory_bytes / 1e6:.0f} MB")
    if server.slow_consumers is not None:
        parts.append(f"slow consumers {server.slow_consumers}")
    slow = [
        f"{each.worker} has {size(each.pending_bytes)} unread" for each in server.clients[:SHOWN_SLOW] if each.pending_bytes
    ]
    slow += [f"{each.worker} was cut off at {each.at[11:19]}" for each in server.cut[-SHOWN_SLOW:]]
    lines = [Text(" · ".join(parts))] if parts else []
    return lines + ([Text(" · ".join(slow), style="yellow")] if slow else [])


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count:.0f} B"


def _errors(numbers: dict[str, Any]) -> str:
    found = {**numbers["excluded"], **numbers["errors"]}
    counted = [f"{name} {count}" for name, count in sorted(found.items(), key=lambda each: -each[1]) if count]
    takeovers = [f"take-overs {numbers['takeovers']}"] if numbers["takeovers"] else []
    named = [f"by class: {counted[0]}", *counted[1:6]] if counted else []
    return " · ".join([*named, *takeovers])


def _table(workers: Sequence[WorkerRow]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("slots", "version", "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in workers:
        style = _STYLES.get(row.state, "")
        slots = f"{row.in_flight}/{row.slots}" if row.slots else ""
        version = str(row.policy_version) if row.policy_version >= 0 else ""
        table.add_row(
            row.worker, row.role, Text(row.state, style=style), slots, version, f"{row.seconds:.0f} s ago", style=style
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
