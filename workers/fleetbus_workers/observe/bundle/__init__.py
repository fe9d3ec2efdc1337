"""A static copy of a run's page: opens without fleetbus, from a folder or any server of files."""
