"""What `import fleetbus` offers beyond messages and environments: runs from Python, evaluation, and readers of runs."""
