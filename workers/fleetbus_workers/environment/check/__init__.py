"""An environment played outside of a run, everything it returns checked: ``fleetbus check``, and the beginning of `up`."""
