"""Trainers of others: they train what the learner makes batches of (docs/trainers.md)."""
