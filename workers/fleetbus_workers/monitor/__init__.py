"""``fleetbus monitor``: one web page about one run. It only reads; above it is the command line, below it the bus."""
