"""``python -m fleetbus_workers.cli``: how `fleetbus up` starts its role processes."""

from fleetbus_workers.cli import main

main()
