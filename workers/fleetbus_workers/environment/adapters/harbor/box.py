"""The box in which a Harbor task is played and graded: a protocol, with a Docker engine or the sandbox behind it."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from fleetbus.tasks.harbor import Place
from fleetbus_workers.environment.failure_location import clean_error

LOGS, TESTS, SOLUTION = "/logs", "/tests", "/solution"
VERIFIER_LOGS, ARTIFACTS = "/logs/verifier", "/logs/artifacts"
FOLDERS = ("/logs/agent", VERIFIER_LOGS, ARTIFACTS, TESTS, SOLUTION)
"""Folders that every box has."""

MAX_ARTIFACT_BYTES = 256 << 20

REASON_CHARS = 300
_ERRORS = ("ERROR:", "error:", "E: ")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a shell command. ``ended``: empty, ``time``, ``memory`` or ``exit`` (all that ran in the box has ended)."""

    output: str
    exit_code: int
    ended: str = ""


def find_reason(output: str) -> str:
    """The line in which a command that failed says why, at most `REASON_CHARS`: the last that an installer calls an error (pip,
    uv, apt), else the last one; empty if it wrote nothing."""
    lines = [line for line in map(str.strip, _COLOURS.sub("", output).splitlines()) if line]
    errors = [line for line in lines if line.startswith(_ERRORS)]
    return clean_error((errors or lines or [""])[-1])[:REASON_CHARS]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The recipe of a box: a folder with a Dockerfile, or an image; and what it may use. ``digest`` is of the folder."""

    folder: Path
    digest: str
    place: Place
    variables: Mapping[str, str] = {}


class Box(Protocol):
    """One container, or what stands in for it. Everything raises `EnvironmentFailed` when the outside system fails."""

    async def run(
        self, command: str, *, user: str | int | None, variables: Mapping[str, str], seconds: float, workdir: str | None = None
    ) -> CommandResult:
        """Run a shell command; what it started in the background lives on."""

    async def put(self, source: Path, target: str) -> None:
        """Copy what is in a folder of this machine into a folder of the box, over what is there."""

    async def clear(self, folder: str) -> None:
        """Leave the folder empty, and writable for every user of the box."""

    async def read(self, path: str, limit: int) -> bytes | None:
        """The content of a regular file; None if there is none. A larger one is cut after ``limit`` + 1 bytes."""

    async def export(self, paths: Sequence[str], target: Path) -> None:
        """Copy files and folders of the box below a folder of this machine, each under its whole path; what is not there is
        left out, and so are links."""

    async def end_processes(self) -> None:
        """End everything that runs in the box; its files stay."""

    async def stop(self) -> None:
        """Remove all of it; nothing is wrong if it is gone already."""


class BoxMaker(Protocol):
    """Makes boxes, and keeps what they are made from. `run` is entered around all of them and sweeps what a crash left."""

    def run(self) -> AbstractAsyncContextManager[None]: ...

    def find_unsupported(self, recipe: Recipe, users: Sequence[str | int | None]) -> list[str]:
        """The features that a recipe asks for and these boxes lack."""

    async def prepare(self, recipe: Recipe) -> None:
        """Build or fetch what boxes of this recipe are made from, once."""

    async def start(self, recipe: Recipe) -> Box:
        """A new box; cancelled or failed, it leaves nothing."""
