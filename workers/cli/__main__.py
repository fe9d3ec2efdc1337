"""``python -m workers.cli``: how `fleetbus up` starts its role processes."""

from workers.cli import main

main()
