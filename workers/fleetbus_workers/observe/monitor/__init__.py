"""``fleetbus monitor``: one web page about one run. Read-only; above it is the command line, below it the bus."""
