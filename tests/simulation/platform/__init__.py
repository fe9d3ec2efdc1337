"""What the simulated workers run on: bus, network, storage, processes."""
