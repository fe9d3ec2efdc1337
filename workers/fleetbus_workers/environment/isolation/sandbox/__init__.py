"""Code of models and of task files, run where it can do no harm."""

from fleetbus_workers.environment.isolation.sandbox.backends import Isolation, IsolationUnavailable, find_isolation
from fleetbus_workers.environment.isolation.sandbox.session import CallResult, ExecutionResult, SandboxLimits, SandboxSession

__all__ = [
    "CallResult",
    "ExecutionResult",
    "Isolation",
    "IsolationUnavailable",
    "SandboxLimits",
    "SandboxSession",
    "find_isolation",
]
