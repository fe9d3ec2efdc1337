"""Access to the bus: keys per role, rights per role, TLS. Written by ``fleetbus auth init``, used by every worker."""
