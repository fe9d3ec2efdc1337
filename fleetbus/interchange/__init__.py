"""Episodes in formats of other tools, written from a log and read into a recording: trajectories of ATIF, logs of Inspect."""
