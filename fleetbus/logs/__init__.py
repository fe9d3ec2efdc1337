"""Structured logs without secrets and without control characters of foreign text."""
