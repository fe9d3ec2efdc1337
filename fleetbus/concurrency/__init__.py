"""Tasks, time limits, locks and wakeups beyond what anyio has, for thousands of tasks in one process."""
