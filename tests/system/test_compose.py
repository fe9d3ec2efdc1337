"""compose.yaml for real: built, trained with, its containers killed meanwhile, its books audited: `just test-compose`.

Needs a Docker engine, docker-compose (1.29 or later, or the plugin) and the image python:3.11-slim. PIP_INDEX_URL,
PIP_FIND_LINKS and TORCH_INDEX are passed on to the builds; COMPOSE_IMAGES=ready skips them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("server", "tools", "environment", "learner", "inference", "monitor")
BUILD_ARGUMENTS = ("PIP_INDEX_URL", "PIP_FIND_LINKS", "TORCH_INDEX")
NKEY_SEED = re.compile(rb"\bS[A-Z2-7]{57}\b")


def compose_command() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    return ["docker", "compose"]


def has_engine() -> bool:
    return shutil.which("docker") is not None and subprocess.run(["docker", "info"], capture_output=True).returncode == 0


pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400), pytest.mark.skipif(not has_engine(), reason="no Docker engine")]


class Project:
    """One `compose up`, under a name of its own."""

    def __init__(self, steps: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._variables = os.environ | {
            "COMPOSE_PROJECT_NAME": f"fleetbus-test-{secrets.token_hex(3)}",
            "RUN": "composed",
            "STEPS": str(steps),
            "MONITOR_PORT": str(self.port),
        }

    def compose(self, *arguments: str) -> bytes:
        return self._run([*compose_command(), "-f", str(ROOT / "compose.yaml"), *arguments])

    def docker(self, *arguments: str) -> bytes:
        return self._run(["docker", *arguments])

    def _run(self, command: list[str]) -> bytes:
        done = subprocess.run(command, cwd=ROOT, env=self._variables, capture_output=True, timeout=600)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).decode().split()

    def kill(self, service: str) -> None:
        """SIGKILL one container of the service, and start it again as an orchestrator would."""
        container = self.containers(service)[0]
        self.docker("kill", container)
        self.docker("start", container)

    def overview(self) -> dict[str, Any] | None:
        opener = build_opener(ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.port}/api/overview", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return None

    def until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 900) -> dict[str, Any]:
        """Poll the monitor, which is another process's, until its overview is as wanted."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            overview = self.overview()
            if overview is not None and holds(overview):
                return overview
            time.sleep(1)
        raise AssertionError((self.overview(), self.compose("ps"), self.compose("logs", "--tail=20")))


@pytest.fixture(scope="module")
def images() -> None:
    if os.environ.get("COMPOSE_IMAGES") == "ready":
        return
    given = [f"--build-arg={name}={os.environ[name]}" for name in BUILD_ARGUMENTS if name in os.environ]
    for target in TARGETS:
        command = ["docker", "build", "--network=host", *given, f"--target={target}", "-t", f"fleetbus/{target}", str(ROOT)]
        subprocess.run(command, check=True, timeout=1800)


@pytest.fixture
def project(images: None) -> Iterator[Project]:
    started = Project(steps=14)
    try:
        yield started
    finally:
        started.compose("down", "--volumes", "--timeout", "20")


def test_a_fleet_in_containers_trains_while_they_are_killed_and_its_books_balance(project: Project) -> None:
    project.compose("up", "-d", "--no-build", "--scale", "environment=2")
    project.until(lambda overview: overview["numbers"]["finished_episodes"] >= 64)
    for service in ("environment", "inference", "learner", "nats"):
        before = project.until(lambda overview: overview["numbers"]["step"] >= 1)["numbers"]
        project.kill(service)
        project.until(
            lambda overview, step=before["step"]: overview["numbers"]["step"] > step or overview["numbers"]["finished"]  # type: ignore[misc]
        )
    killed = project.until(lambda overview: overview["numbers"]["finished"])
    report = json.loads(project.compose("exec", "-T", "monitor", "fleetbus", "audit", "composed", "--json"))
    assert report["balanced"], report["findings"]
    assert killed["numbers"]["step"] == 14
    print(
        f"takeovers {killed['numbers']['takeovers']}, outcomes {killed['numbers']['outcomes']}, lineages {report['lineages']}"
    )
    check_no_secrets(project)


def check_no_secrets(project: Project) -> None:
    """Neither in logs, nor in what `docker inspect` and `ps` show to whoever looks."""
    texts = [project.compose("logs", "--no-color")]
    for container in project.compose("ps", "-q").decode().split():
        texts.append(project.docker("inspect", container))
        if json.loads(texts[-1])[0]["State"]["Running"]:
            texts.append(project.docker("top", container))
    assert [found for text in texts if (found := NKEY_SEED.search(text))] == []


def test_each_role_gets_its_own_key_and_no_other(project: Project) -> None:
    project.compose("up", "-d", "--no-build", "monitor", "environment")
    for service in ("monitor", "environment"):
        listed = project.compose("exec", "-T", service, "sh", "-c", "find /auth -type f | sort").decode().split()
        assert listed == [f"/auth/{service}/ca.pem", f"/auth/{service}/composed.{service}.nk"]
        assert project.compose("exec", "-T", service, "id", "-u").strip() == b"1000"
