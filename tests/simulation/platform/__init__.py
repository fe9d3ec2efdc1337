"""The platform of the simulated workers: bus, network, storage, processes."""
