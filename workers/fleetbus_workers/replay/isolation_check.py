"""The refusal of verifiers that cannot be isolated here, said once and not with every verdict."""

from __future__ import annotations

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.environment.isolation.sandbox.backends import IsolationUnavailable, find_isolation


async def check_isolation(configuration: Configuration) -> None:
    """Raises `UserError` where nothing isolates verifiers and the settings do not trust them."""
    if configuration.environment.sandbox == "limits":
        return
    try:
        await find_isolation()
    except IsolationUnavailable as error:
        raise UserError(
            f"verifiers are not run without isolation: {error}; or trust this one: set environment.sandbox = limits"
        ) from error
