"""``python -m fleetbus``: the command line."""

import importlib

if __name__ == "__main__":
    importlib.import_module("fleetbus_workers.cli").main()
