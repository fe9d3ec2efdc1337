"""Programs that run inside the isolation, with the standard library alone."""
