"""`fleetbus up`: a NATS server, all roles as processes, progress, and the report. Below the command line, above the bus."""
