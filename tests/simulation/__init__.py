"""A whole fleet in one thread under virtual time: the real workers, seeded faults, and continuous invariant checks.

Above it is `just sim`; below it are the real worker packages and the bus in memory. Nothing here may know how a worker does
its work: it sees what a server, an environment, an engine and a trainer see.
"""
