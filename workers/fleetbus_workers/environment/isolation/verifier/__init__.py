"""Grading by a task's own code, in a process of its own with limits."""

from fleetbus_workers.environment.isolation.verifier.base import Grader, Policy, VerifierLimits, VerifierTools
from fleetbus_workers.environment.isolation.verifier.sandbox import Verifier

__all__ = ["Grader", "Policy", "Verifier", "VerifierLimits", "VerifierTools"]
