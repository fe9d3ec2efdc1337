"""``fleetbus top``: a run as a live table on a terminal. Read-only."""
