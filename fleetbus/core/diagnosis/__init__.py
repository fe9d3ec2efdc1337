"""The diagnosis of a run: numbers with intervals out of its log, and since which step they are out of bounds. Pure."""
