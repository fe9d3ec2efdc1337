"""Environments on the Fleet platform: instances made over its HTTP API, used over MCP, graded by the platform's verifiers."""
