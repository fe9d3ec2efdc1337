"""Where a run's metrics are kept, per training step and per evaluation: a file per outside system."""
