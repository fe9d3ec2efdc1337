"""The part of `import fleetbus` beyond messages and environments: runs from Python, evaluation, and readers of runs."""
