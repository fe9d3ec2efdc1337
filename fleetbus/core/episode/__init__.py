"""One episode: its claims, token history, segments, journal and result."""
