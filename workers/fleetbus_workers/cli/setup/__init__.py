"""Commands that prepare a run, its keys, tasks and environments."""
