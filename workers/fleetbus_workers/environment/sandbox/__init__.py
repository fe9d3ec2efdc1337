"""Code of models and of task files, run where it can do no harm."""

from fleetbus_workers.environment.sandbox.isolation import Isolation, IsolationUnavailable, find_isolation
from fleetbus_workers.environment.sandbox.session import Ran, SandboxLimits, SandboxSession

__all__ = ["Isolation", "IsolationUnavailable", "Ran", "SandboxLimits", "SandboxSession", "find_isolation"]
