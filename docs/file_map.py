"""Prints what every source file is for: its path and the first sentence of its docstring. ``just map [FOLDER]``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("schemas/fleetbus_schemas", "fleetbus", "workers/fleetbus_workers")


def list_sources(folder: str = "") -> Iterator[Path]:
    """Every source file below ``folder`` (a prefix of its path in the project) that holds code."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.relative_to(ROOT).as_posix().startswith(folder) and path.read_text(encoding="utf-8").strip():
                yield path


def read_purpose(path: Path) -> str:
    """The first line of a file's docstring; empty if it has none."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    for source in list_sources(*sys.argv[1:2]):
        print(f"{source.relative_to(ROOT).as_posix():<84} {read_purpose(source)}")
