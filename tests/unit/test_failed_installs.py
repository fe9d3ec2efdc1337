"""An image that cannot be built because a package cannot be installed: the line that says why is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fleetbus.tasks.harbor import Place
from fleetbus_workers.environment.adapters.harbor.box import REASON_CHARS, CommandResult, Recipe, find_reason
from fleetbus_workers.environment.adapters.harbor.docker_box import _Build
from fleetbus_workers.environment.adapters.harbor.sandbox_box import _expect
from fleetbus_workers.environment.base import EnvironmentFailed

WHY = "ERROR: No matching distribution found for nosuchpackage"
PIP = f"""Collecting nosuchpackage
[stderr]
WARNING: Retrying (Retry(total=4)) after connection broken
\x1b[31mERROR: Could not find a version that satisfies the requirement nosuchpackage (from versions: none)\x1b[0m
\x1b[31m{WHY}\x1b[0m

[notice] A new release of pip is available: 24.0 -> 26.1
"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (PIP, WHY),
        ("Resolving\nerror: Failed to fetch: x\n  Caused by: y\n", "error: Failed to fetch: x"),
        ("Reading package lists...\nE: Unable to locate package x\n", "E: Unable to locate package x"),
        ("first\n  last  \n", "last"),
        ("", ""),
        ("ERROR: " + "x" * 10_000, "ERROR: " + "x" * (REASON_CHARS - 7)),
    ],
    ids=["pip", "uv", "apt", "other", "nothing", "long"],
)
def test_the_line_that_says_why_is_the_last_error_of_the_installer(output: str, reason: str) -> None:
    assert find_reason(output) == reason


def test_a_password_in_an_index_s_url_is_taken_out_before_the_line_is_cut() -> None:
    url = "https://user:hunter2secret@index.example/simple"
    for before in range(REASON_CHARS - 80, REASON_CHARS):
        assert "hunter2" not in find_reason("ERROR: " + "x" * before + f" {url}")


async def test_a_dockerfile_in_the_sandbox_tells_why_its_install_failed() -> None:
    class Box:
        async def run(self, command: str, **_: Any) -> CommandResult:
            return CommandResult(output=PIP, exit_code=1)

    with pytest.raises(EnvironmentFailed) as failed:
        await _expect(Box(), "pip install nosuchpackage", "/")  # type: ignore[arg-type]
    assert str(failed.value) == f"RUN pip install nosuchpackage: exit code 1: {WHY}"


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """As much of docker-py as a build that fails needs."""

    class BuildError(Exception):
        def __init__(self, msg: str, build_log: Iterator[dict[str, str]]) -> None:
            super().__init__(msg)
            self.msg, self.build_log = msg, build_log

    def build(**_: Any) -> None:
        log = [{"stream": line} for line in PIP.splitlines(keepends=True)]
        raise BuildError(
            "The command '/bin/sh -c pip install nosuchpackage' returned a non-zero code: 1", iter([*log, {"aux": ""}])
        )

    module = ModuleType("docker")
    api = SimpleNamespace(hooks={"response": []})
    module.errors = SimpleNamespace(BuildError=BuildError)  # type: ignore[attr-defined]
    client = SimpleNamespace(api=api, images=SimpleNamespace(build=build), close=lambda: None)
    module.from_env = lambda timeout: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "docker", module)
    yield module


def test_a_docker_engine_tells_why_its_install_failed(docker: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        _Build(Recipe(folder=tmp_path, digest="d", place=Place()), "image").run(None)
    assert str(failed.value).endswith(f"returned a non-zero code: 1: {WHY}")
