"""Sinks keep a run's metrics, per training step and per evaluation: a file per outside system."""
