"""OpenTelemetry resource of a span: a role is a service, a worker one instance of it."""

from __future__ import annotations

from fleetbus.recording.writer import read_fleetbus_version

SCOPE = "fleetbus"


def build_resource_attributes(run: str, role: str, worker: str) -> dict[str, str]:
    """The attributes of a worker's resource."""
    named = {"service.instance.id": worker} if worker else {}
    about = {"service.name": f"fleetbus-{role}", "service.namespace": "fleetbus", "service.version": read_fleetbus_version()}
    return about | named | {"fleetbus.run": run}
