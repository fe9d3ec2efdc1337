"""Reads back what is stored: episodes, Actions, versions and the floor, from the log and from its archive."""
