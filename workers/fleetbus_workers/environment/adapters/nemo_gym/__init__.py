"""Environments on resources servers of NeMo Gym, over HTTP."""
