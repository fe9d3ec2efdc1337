"""Metrics of a run under their Prometheus names, and sinks that keep them elsewhere."""
