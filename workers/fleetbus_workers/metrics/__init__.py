"""``fleetbus metrics``: a run's metrics for Prometheus and other sinks. It only looks."""
