"""Faults of a scenario, applied at their times."""
