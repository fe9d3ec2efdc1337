"""Environments on Fleet as a worker makes them: settings and key in, one `McpEnvironment` per episode out."""

import os

from fleetbus.errors import UserError
from fleetbus_schemas import Task, ToolCall
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.fleet.api import DEFAULT_BASE_URL
from fleetbus_workers.environment.adapters.fleet.connection import COMPUTER, SCREEN_MODALITIES, FleetConnection
from fleetbus_workers.environment.adapters.fleet.grader import PlatformGrader
from fleetbus_workers.environment.adapters.fleet.host import FleetHost
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.task_permissions import check_http_address

KEY_VARIABLE = "FLEET_API_KEY"
URL_VARIABLE = "FLEET_BASE_URL"


def build(context: AdapterContext) -> Factory:
    """Environments on the platform at the spec's address, else at ``FLEET_BASE_URL``, else at Fleet itself.

    Raises `UserError` without a key, or for what is no address.
    """
    spec, configuration = context.spec, context.settings
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise UserError(f"environment {spec!r} needs a key: set {KEY_VARIABLE}")
    base_url = context.rest or os.environ.get(URL_VARIABLE, "").strip() or DEFAULT_BASE_URL
    check_http_address(spec, base_url, example=f"fleet:{DEFAULT_BASE_URL}", secret=KEY_VARIABLE)
    host = FleetHost(base_url=base_url, key=key, run=configuration.run.name, settings=configuration.fleet)

    limits = configuration.limits

    def make() -> Environment:
        platform = PlatformGrader(host)

        def connect(task: Task) -> FleetConnection:
            platform.connection = FleetConnection(host, task, call_seconds=limits.tool_call, episode_seconds=limits.episode)
            return platform.connection

        arguments = context.mcp_arguments("fleet")
        if configuration.fleet.verifier == "platform":
            arguments["grader"] = platform
        return McpEnvironment(connect, first_call=choose_first_call, **arguments)

    return Factory(make, host.run)


def choose_first_call(task: Task) -> ToolCall | None:
    """The call for a screenshot where there is a screen: the policy sees it together with its task."""
    return ToolCall(name=COMPUTER, arguments={"action": "screenshot"}) if task.modality in SCREEN_MODALITIES else None
