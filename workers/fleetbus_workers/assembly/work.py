"""The work of a role: loading it, though packages may be missing, and doing it on a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import anyio

from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus
from fleetbus.bus.streams import observations_consumer, tasks_consumer
from fleetbus.config.pools import list_served_pools
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import ANY_LANE, Subjects, WorkerRole

if TYPE_CHECKING:
    from fleetbus.bus.nats.bus import NatsBus

Work = Callable[["Bus", "Configuration", str, anyio.Event], Coroutine[Any, Any, None]]
"""A role's loop: returns when it is finished or, once the event is set, drained."""

_EXTRAS = {"torch": "torch", "transformers": "torch", "tokenizers": "torch", "safetensors": "torch", "numpy": "torch"}
_EXTRAS |= {"mcp": "environment", "httpx": "environment", "matplotlib": "plot"}


def import_work(load_work: Callable[[], Work]) -> Work:
    """The work that ``load_work`` imports. Raises `UserError` naming the extra to install when a package is missing."""
    try:
        return load_work()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise UserError(f"{package} is not installed: pip install 'fleetbus[{_EXTRAS[package]}]'") from error


async def serve_role(role: str, work: Work, configuration: Configuration, name: str, url: str, drain: anyio.Event) -> None:
    """Connect as ``role`` and work until finished or drained; a program whose protocol does not fit the run waits until it
    does (docs/decisions/0217-a-protocol-version-in-the-run.md). Raises `UserError` if the run is not declared there."""
    from fleetbus.bus.nats import connect
    from fleetbus.delivery.protocol_wait import wait_for_protocol
    from fleetbus.delivery.service_api import Microservice

    access = build_access(role, configuration.nats.auth, configuration.run.name)
    run = configuration.run.name
    async with connect(url, run=run, role=role, worker=name, **access) as bus, anyio.create_task_group() as services:
        await _check_declared(bus, configuration, role)
        subjects = Subjects(run)
        services.start_soon(Microservice(bus, subjects, role=role, worker=name).run)
        if await wait_for_protocol(bus, bus.run_protocol, subjects, role=cast("WorkerRole", role), worker=name, drain=drain):
            await work(bus, configuration, name, drain)
        services.cancel_scope.cancel()


async def _check_declared(bus: NatsBus, configuration: Configuration, role: str) -> None:
    from fleetbus.bus.nats.api import CONSUMER_NOT_FOUND, ApiRefused

    run, policy, pools = configuration.run.name, configuration.run.policy, list_served_pools(configuration)
    consumers = {
        "environment": [tasks_consumer(pool) for pool in pools],
        "inference": [observations_consumer(policy, ANY_LANE)],
    }
    try:
        await bus.check_log()
        if role in consumers:  # they are declared last
            await bus.ack_floors(consumers[role])
    except ApiRefused as refused:
        if refused.code != CONSUMER_NOT_FOUND:
            raise
        raise UserError(
            f"run {run} is declared without pool {', '.join(pools)}, policy {policy} or its lanes: "
            f"repeat `fleetbus init --run {run}` with them"
        ) from None
