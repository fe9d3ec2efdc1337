"""The page's modules as one script: a browser that opens a file imports no modules and fetches nothing. Pure.

It relies on how the page is written: each import and export is a line of its own, and all of them have names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (async function|function|const|let|class) (\w+)", re.MULTILINE)
_LEFT = re.compile(r"^\s*(import|export)\b.*$", re.MULTILINE)

STYLE, SCRIPT = '<link rel="stylesheet" href="/page/style.css">', '<script type="module" src="/page/app.js"></script>'


def join_modules(modules: Mapping[str, str], first: str) -> str:
    """One script that does what importing the module ``first`` does; ``modules`` are texts by file name. Raises `ValueError`
    for an import or export that is written otherwise, and for modules that import each other in a circle."""
    needed: dict[str, set[str]] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed[name] = {found[2] for found in _IMPORT.finditer(modules[name])}
            waiting += needed[name]
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        raise ValueError(f"modules of the page import each other: {' '.join(error.args[1])}") from error
    parts = (f"modules[{name!r}] = (() => {{\n{_translate(name, modules[name])}}})();\n" for name in order)
    return f'"use strict";\n(() => {{\nconst modules = {{}};\n{"".join(parts)}}})();\n'


def _translate(name: str, text: str) -> str:
    """The body of a function that returns what the module exports."""
    exported = [found[2] for found in _EXPORT.finditer(text)]
    body = _IMPORT.sub(lambda found: f"const {{ {found[1]} }} = modules[{found[2]!r}];", text)
    body = _EXPORT.sub(lambda found: f"{found[1]} {found[2]}", body)
    if odd := _LEFT.search(body):
        raise ValueError(f"{name} of the page has a line that cannot be joined: {odd[0].strip()[:80]}")
    return f"{body}return {{ {', '.join(exported)} }};\n"


def build_index(page: str, *, scripts: tuple[str, ...]) -> str:
    """The page's ``index.html`` with these scripts in place of its module. Raises `ValueError` if it names its files
    otherwise."""
    if page.count(STYLE) != 1 or page.count(SCRIPT) != 1:
        raise ValueError("index.html of the page does not name its style and its module as expected")
    tags = "\n".join(f'<script defer src="{script}"></script>' for script in scripts)
    return page.replace(STYLE, '<link rel="stylesheet" href="page/style.css">').replace(SCRIPT, tags)
