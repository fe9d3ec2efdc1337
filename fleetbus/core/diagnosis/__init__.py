"""Why a run learns or does not: numbers with intervals out of its log, and since which step they are out of bounds. Pure."""
