"""``fleetbus top``: a run as a live table on a terminal. It only looks."""
