"""The diagnosis of a run that learns, or does not: numbers with intervals out of its log, and since which step they are out of bounds. Pure."""
