"""The policies of a run beside its own: those of seats, as `top` and the metrics show them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetbus_schemas.names import is_name
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.worker_registry import WorkerRow

STALENESS = "staleness_mean"


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that plays a seat. ``step``, ``version``, and of the last step ``reward`` and ``staleness`` (mean of the steps
    between sampling and training), are those of one that a learner of its own trains. ``workers`` serve it now."""

    policy: str
    trained: bool
    step: int = 0
    version: int = 0
    reward: float | None = None
    staleness: float | None = None
    workers: tuple[str, ...] = ()

    def describe(self, *, is_over: bool) -> list[str]:
        """The parts of its line; nobody needs to serve it once the run ``is_over``."""
        served = [] if is_over else [f"served by {', '.join(self.workers) or 'nobody'}"]
        if not self.trained:
            return [f"{self.policy}: not trained", *served]
        numbers = [("reward", self.reward, ".3f"), ("staleness", self.staleness, ".1f")]
        known = [f"{name} {value:{form}}" for name, value, form in numbers if value is not None]
        return [f"{self.policy}: step {self.step}", f"version {self.version}", *known, *served]


def list_seat_policies(state: RunState, workers: Sequence[WorkerRow]) -> list[PolicyRow]:
    """Those that learners train first, by name, `MAX_SEATS` at most; none before it is known which policy is the run's own."""
    if not state.policy:
        return []
    serving: dict[str, list[str]] = {}
    for row in workers:
        if row.role == "inference" and is_name(row.policy) and row.state in ("working", "draining"):
            serving.setdefault(row.policy, []).append(row.worker)
    trained = state.joined.names | state.others.keys()
    others = (state.seat_policies | serving.keys()) - trained - {state.policy}
    names = [*sorted(trained), *sorted(others)][:MAX_SEATS]
    return [_build_row(state, name, tuple(serving.get(name, ()))) for name in names]


def _build_row(state: RunState, policy: str, workers: tuple[str, ...]) -> PolicyRow:
    history = state.others.get(policy)
    if history is None or not history.steps:
        return PolicyRow(policy=policy, trained=history is not None or policy in state.joined.names, workers=workers)
    last = history.steps[-1]
    return PolicyRow(
        policy=policy,
        trained=True,
        step=last.step,
        version=last.version,
        reward=last.metrics.get("reward"),
        staleness=last.metrics.get(STALENESS),
        workers=workers,
    )
