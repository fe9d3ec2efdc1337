"""Agents in the sandbox see a /proc of their own: themselves, nothing of the host's, nothing of the agent beside them."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleetbus.config.settings import Configuration, EnvironmentSettings
from fleetbus_workers.environment.adapters.agent import host as agent_host
from fleetbus_workers.environment.isolation.sandbox import Isolation, backends
from fleetbus_workers.environment.isolation.sandbox.backends import KINDS
from fleetbus_workers.environment.specs import build_environment_factory
from tests.attacks.test_agents import SPEC, opened, told
from tests.support.backends import asyncio_alone

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="agents are confined on Linux"),
    pytest.mark.timeout(120),
    pytest.mark.integration,
]

anyio_backend = asyncio_alone

WAYS = [
    pytest.param(
        Isolation(kind=kind, own_users=own_users, private_proc=True), id=f"{kind}-{'own_users' if own_users else 'root'}"
    )
    for kind in KINDS
    for own_users in (False, True)
]


ROOTS_LEAK = "processes without a limit"
"""The kernel counts none of root's in a user namespace, so that a worker takes the other way; /proc is the same in both."""


@pytest.fixture(params=WAYS)
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isolation:
    """Each kind of isolation that this machine has, as root and as another user has it."""
    way: Isolation = request.param
    if not way.own_users and os.geteuid() != 0:
        pytest.skip("needs root")
    if leak := backends._find_leak(way).removeprefix(ROOTS_LEAK):
        pytest.skip(leak)
    monkeypatch.setattr(agent_host, "require_isolation", lambda: way)
    if way.own_users:
        monkeypatch.setattr(agent_host, "give_tree", lambda folder, user: None)
    return way


def build_factory() -> Any:
    configuration = Configuration(environment=EnvironmentSettings(agent_isolation="required", agent_reward_url=True))
    return build_environment_factory(SPEC, verifier=None, configuration=configuration)  # type: ignore[arg-type]


async def test_an_agent_sees_its_own_processes_and_nothing_of_the_agent_beside_it(isolation: Isolation) -> None:
    factory = build_factory()
    async with factory.run(), opened(factory, "look_at_processes") as first, opened(factory, "look_at_processes") as second:
        for environment in (first, second):
            seen = await told(environment)
            numbers = [int(name) for name in seen["processes"] if name.isdigit()]
            assert seen["own"].startswith("Name:\tpython") and seen["changed"] == "Read-only file system"
            assert numbers and max(numbers) < 10, "a namespace of its own, with the sandbox's three or four processes"
            assert {"self", "meminfo", "cpuinfo"} <= set(seen["processes"])
            assert set(seen["others"]) <= {"/proc/1/environ", "/proc/1/fd"}, "bubblewrap's first process, of the same user"
            said = str(seen["others"])
            assert not [word for word in ("fbs-", "API_KEY", "PATH", "memfd", "pipe") if word in said]


async def test_a_sandbox_that_cannot_show_processes_is_used_without_and_says_which_agents_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose own /proc is masked: there the kernel refuses another."""
    monkeypatch.setattr(backends, "_find_leak", lambda isolation: "mount /proc" if isolation.private_proc else "")
    monkeypatch.setattr(backends, "_detected", {})
    with capture_logs() as lines:
        found = agent_host.find_agent_isolation("required")
    assert found is not None and not found.private_proc and "/proc" not in found.command(["/bin/true"], proc=True)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == [agent_host.NO_PROC]
