"""The parts that every worker shares: slots, leases, lanes, heartbeats, control, and the requests of episodes."""
