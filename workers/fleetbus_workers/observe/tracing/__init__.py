"""``fleetbus trace``: the log of a run as OpenTelemetry traces, one per episode. Read-only; workers are not involved."""
