"""What is stored, read back: episodes, Actions, versions and the floor, from the log and from its archive."""
