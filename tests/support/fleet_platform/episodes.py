"""Episodes on the platform double: a platform that runs, and environments on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, FleetSettings, LimitSettings, RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.fleet import host as fleet_host
from fleetbus_workers.environment.adapters.fleet.factory import build
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.base import Start
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.http_server import LocalServer, serve_application
from tests.support.tool_calls import NoGrader

VERIFIER = """
async def verify(env, final_answer=None, conversation=None):
    rows = await env.query("SELECT ordered FROM items WHERE name = ?", ["ink"])
    return 1.0 if rows[0]["ordered"] == 1 and final_answer == "9" else 0.0
"""


TASK = Task(
    key="buy-ink",
    env="shop:1.2",
    prompt="Order ink, then call submit_final_answer with its price.",
    env_variables={"LOGGED_IN_NAME": "Ada"},
    config={"data_key": "small:0.4"},
    seed=7,
    verifier=VERIFIER,
)


@asynccontextmanager
async def platform(given: FleetPlatform | None = None) -> AsyncIterator[tuple[FleetPlatform, LocalServer]]:
    made = given or FleetPlatform()
    async with serve_application(made.app) as server:
        yield made, server


def settings(*, call_seconds: float = 60.0, **fleet: Any) -> Configuration:
    return Configuration(
        run=RunSettings(name="tested"), limits=LimitSettings(tool_call=call_seconds), fleet=FleetSettings(**fleet)
    )


def fleet_environments(server: LocalServer, configuration: Configuration, **options: Any) -> Factory:
    """Environments on the platform that is served."""
    given: dict[str, Any] = {"grader": NoGrader(), **options}
    return build(AdapterContext(spec=f"fleet:{server.url}", settings=configuration, **given))


@asynccontextmanager
async def environments(
    server: LocalServer, configuration: Configuration | None = None, **options: Any
) -> AsyncIterator[McpEnvironment]:
    """One environment, not yet open, closed at the end."""
    factory = fleet_environments(server, configuration or settings(), **options)
    with anyio.fail_after(45):
        async with factory.run():
            environment = factory()
            assert isinstance(environment, McpEnvironment)
            try:
                yield environment
            finally:
                await environment.close()


async def begun(environment: McpEnvironment, task: Task = TASK) -> Start:
    await environment.open(task)
    return await environment.reset()


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform's key in the variables, and tries that follow each other at once."""
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    monkeypatch.delenv("RUNNER_AUTH_TOKEN", raising=False)
    monkeypatch.setattr(fleet_host, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(fleet_host, "MAX_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("fleetbus_workers.environment.adapters.fleet.grader.FIRST_PAUSE_SECONDS", 0.01)
