"""Versions of the policy's weights: as files, in a store, on their way to a worker, as what changed."""
