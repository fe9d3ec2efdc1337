"""The audit of a run: its log, its archive or a recording read into the books of `fleetbus.core.audit.books`."""
