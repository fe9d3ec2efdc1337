"""``fleetbus metrics``: a run's metrics for Prometheus and other sinks. Read-only."""
