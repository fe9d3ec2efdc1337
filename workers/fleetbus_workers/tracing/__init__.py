"""``fleetbus trace``: the log of a run as OpenTelemetry traces, one per episode. It only reads; no worker knows of it."""
