"""Callers and trainers that are checked while they run."""
