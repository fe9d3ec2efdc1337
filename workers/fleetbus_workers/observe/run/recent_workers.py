"""Records of workers by role and name, of so many at most. Pure.

Whoever has a key of a role may beat under as many names of that role as he likes, and of no other: so each role has a bound of
its own, and nobody pushes out the workers of another one.
"""

from typing import Generic, TypeVar

from fleetbus_schemas import WorkerRole

MOST_WORKERS = 4096
"""Of each role, those that were put last."""

R = TypeVar("R")


class RecentWorkers(Generic[R]):
    """The records of a role stand in the order in which they were put."""

    def __init__(self) -> None:
        self._by_role: dict[WorkerRole, dict[str, R]] = {}

    def get(self, role: WorkerRole, worker: str) -> R | None:
        return self._by_role.get(role, {}).get(worker)

    def put(self, role: WorkerRole, worker: str, record: R) -> None:
        of_role = self._by_role.setdefault(role, {})
        of_role.pop(worker, None)
        of_role[worker] = record
        if len(of_role) > MOST_WORKERS:
            del of_role[next(iter(of_role))]

    def remove(self, role: WorkerRole, worker: str) -> None:
        self._by_role.get(role, {}).pop(worker, None)

    def list_all(self) -> list[tuple[WorkerRole, str, R]]:
        """All of them, role by role."""
        return [(role, worker, each) for role, of_role in self._by_role.items() for worker, each in of_role.items()]
