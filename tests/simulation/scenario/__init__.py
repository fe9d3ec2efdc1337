"""One simulated run, generated from a seed."""
