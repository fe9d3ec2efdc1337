"""Commands that act on a running run."""
