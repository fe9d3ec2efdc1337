"""The workers of a simulated run, configured and started."""
