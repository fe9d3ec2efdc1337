"""Who a span is of, in OpenTelemetry's words: a role is a service, a worker one instance of it."""

from __future__ import annotations

from fleetbus.recording.writer import fleetbus_version

SCOPE = "fleetbus"


def attributes_of(run: str, role: str, worker: str) -> dict[str, str]:
    """The attributes of a worker's resource."""
    named = {"service.instance.id": worker} if worker else {}
    about = {"service.name": f"fleetbus-{role}", "service.namespace": "fleetbus", "service.version": fleetbus_version()}
    return about | named | {"fleetbus.run": run}
