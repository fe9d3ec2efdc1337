"""Access to a run from outside of it: its server's address, its log, its recordings. Below the commands and the API."""
