"""Judges what happened: from the log, from the environments and from the time that it took."""
