"""Whether what happened was allowed: from the log, from the environments and from the time that it took."""
