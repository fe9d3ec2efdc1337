"""Environments on Fleet as a worker makes them: settings and key in, one `McpEnvironment` per episode out."""

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Task, ToolCall
from fleetbus_workers.environment.adapters.common.task_permissions import check_http_address
from fleetbus_workers.environment.adapters.fleet.api import DEFAULT_BASE_URL
from fleetbus_workers.environment.adapters.fleet.connection import COMPUTER, SCREEN_MODALITIES, FleetConnection
from fleetbus_workers.environment.adapters.fleet.grader import PlatformGrader
from fleetbus_workers.environment.adapters.fleet.host import FleetHost
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment, PromptStyle
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.images.observation import StoreImage
from fleetbus_workers.environment.isolation.verifier.base import Grader

KEY_VARIABLE = "FLEET_API_KEY"
URL_VARIABLE = "FLEET_BASE_URL"


def build_fleet_factory(
    spec: str,
    address: str,
    *,
    configuration: Configuration,
    grader: Grader,
    prompt: PromptStyle,
    observation_bytes: int,
    output_chars: int | None = None,
    parallel_calls: int = 1,
    store_image: StoreImage | None = None,
) -> tuple[Callable[[], Environment], Callable[[], AbstractAsyncContextManager[None]]]:
    """Environments on the platform at ``address``, else at ``FLEET_BASE_URL``, else at Fleet itself.

    Raises `UserError` without a key, or for what is no address.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise UserError(f"environment {spec!r} needs a key: set {KEY_VARIABLE}")
    base_url = address or os.environ.get(URL_VARIABLE, "").strip() or DEFAULT_BASE_URL
    check_http_address(spec, base_url, example=f"fleet:{DEFAULT_BASE_URL}", secret=KEY_VARIABLE)
    host = FleetHost(base_url=base_url, key=key, run=configuration.run.name, settings=configuration.fleet)

    limits = configuration.limits

    def make() -> Environment:
        platform = PlatformGrader(host)

        def connect(task: Task) -> FleetConnection:
            platform.connection = FleetConnection(host, task, call_seconds=limits.tool_call, episode_seconds=limits.episode)
            return platform.connection

        return McpEnvironment(
            connect,
            grader=platform if configuration.fleet.verifier == "platform" else grader,
            prompt=prompt,
            observation_bytes=observation_bytes,
            store_image=store_image,
            first_call=choose_first_call,
            output_chars=output_chars,
            parallel_calls=parallel_calls,
        )

    return make, host.run


def choose_first_call(task: Task) -> ToolCall | None:
    """The call for a screenshot where there is a screen: the policy sees it together with its task."""
    return ToolCall(name=COMPUTER, arguments={"action": "screenshot"}) if task.modality in SCREEN_MODALITIES else None
