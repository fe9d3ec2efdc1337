"""Episodes in formats of other tools: trajectories of ATIF and logs of Inspect, written from a log and read into a recording."""
