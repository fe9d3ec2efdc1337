"""Grading by a task's own code, in a process of its own with limits."""

from fleetbus_workers.environment.isolation.verifier.base import Grader, VerifierLimits, VerifierTools
from fleetbus_workers.environment.isolation.verifier.sandbox import Verifier

__all__ = ["Grader", "Verifier", "VerifierLimits", "VerifierTools"]
