"""The part of a Dockerfile that needs no image: folders, files, variables and commands over this machine's own programs."""

import json
import re
import shlex
from pathlib import Path, PurePosixPath

import msgspec

from fleetbus.errors import UserError

SYSTEM = frozenset({"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var"})
"""Folders of the root that belong to the system: what stands there comes from this machine, read-only."""

_IGNORED = frozenset({"FROM", "LABEL", "CMD", "EXPOSE", "MAINTAINER"})


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that the sandbox makes of it, in order: ``("copy", source, target)`` and ``("run", command, workdir)``."""

    workdir: str
    variables: dict[str, str]
    actions: tuple[tuple[str, str, str], ...]
    roots: tuple[str, ...]


def read_dockerfile(folder: Path) -> Build:
    """The Dockerfile of a folder. Raises `UserError` naming what only an image can give."""
    file = folder / "Dockerfile"
    try:
        text = file.read_text()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; a task without a Dockerfile needs Docker") from None
    workdir, variables, actions = "/app", dict[str, str](), list[tuple[str, str, str]]()
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        keyword, rest = word.upper(), rest.strip()
        if not keyword or keyword.startswith("#") or keyword in _IGNORED:
            continue
        if keyword == "WORKDIR":
            workdir = _resolve(workdir, rest)
        elif keyword == "ENV":
            variables |= _read_variables(file, rest)
        elif keyword == "RUN" and not rest.startswith(("[", "--", "<<")):
            actions.append(("run", rest, workdir))
        elif keyword == "COPY" and not rest.startswith("--"):
            *sources, target = _read_words(file, rest)
            directory = target.endswith("/") or len(sources) > 1 or target == "."
            for source in sources:
                actions.append(("copy", _check_source(file, source), _resolve(workdir, target) + ("/" if directory else "")))
        else:
            raise UserError(f"{file}: {line.strip()[:80]!r} needs Docker; without it FROM, WORKDIR, ENV, COPY and RUN are read")
    roots = {workdir, *(target for kind, _, target in actions if kind == "copy")}
    tops = {PurePosixPath(path).parts[1] if len(PurePosixPath(path).parts) > 1 else "" for path in roots}
    if reserved := sorted((tops & SYSTEM) | (tops & {""})):
        raise UserError(f"{file}: writes to /{reserved[0]}, which needs Docker; without it use a folder such as /app")
    return Build(workdir=workdir, variables=variables, actions=tuple(actions), roots=tuple(f"/{top}" for top in sorted(tops)))


def _resolve(workdir: str, path: str) -> str:
    parts: list[str] = []
    for part in PurePosixPath(workdir, path.strip("\"'")).parts[1:]:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/" + "/".join(parts)


def _check_source(file: Path, source: str) -> str:
    if source.startswith("/") or ".." in PurePosixPath(source).parts or "*" in source:
        raise UserError(f"{file}: COPY {source}: name a file or folder beside the Dockerfile")
    return source


def _read_words(file: Path, rest: str) -> list[str]:
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        words = []
    if len(words) < 2 or not all(isinstance(word, str) for word in words):
        raise UserError(f"{file}: COPY {rest[:80]}: give a source and a target")
    return list(words)


def _read_variables(file: Path, rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    if not all("=" in word for word in words):
        raise UserError(f"{file}: ENV {rest[:80]}: write NAME=value")
    return {name: value for name, _, value in (word.partition("=") for word in words)}
