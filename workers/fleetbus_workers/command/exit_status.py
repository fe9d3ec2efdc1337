"""Exit statuses of every command and role."""

FINISHED = 0
CRASHED = 1
REFUSED = 2
"""Bad input: nothing was done."""

INTERRUPTED = 130
"""By Ctrl-C (128 and the signal's number, as shells have it)."""
