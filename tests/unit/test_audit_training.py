"""One learner's book as the audit keeps it: the sums of the oldest steps."""

from __future__ import annotations

import pytest

from fleetbus.core.audit import training as audit_training
from fleetbus.core.audit.findings import Findings
from fleetbus.core.audit.training import Settled, TrainingAudit
from fleetbus_schemas import CheckpointStored, LineageStarted, StepTrained


def keep_books() -> tuple[int, tuple[int, int], int]:
    """Episodes trained, (trained in vain, settled in vain) and steps told apart, after a lineage went back before a step that
    was settled for good."""
    training, findings = TrainingAudit(), Findings()

    def train(sequence: int, step: int, lineage: str, episode: str) -> None:
        trained = StepTrained(lineage=lineage, step=step, version=step, episodes=(episode,), excluded=())
        training.on_step(sequence, trained, findings)

    training.on_lineage(1, LineageStarted(lineage="l1", worker="w"), findings)
    train(2, 1, "l1", "a")
    training.on_checkpoint(3, CheckpointStored(lineage="l1", step=1, version=1, file="", floor=1), findings)
    train(4, 2, "l1", "b")
    training.close({"a", "b"}, findings)
    training.on_lineage(5, LineageStarted(lineage="l2", worker="w", parent="l1", parent_step=1), findings)
    train(6, 2, "l2", "c")
    train(7, 3, "l2", "d")
    training.close({"c", "d"}, findings)
    settled = Settled()
    counted = training.list_settlements(findings)
    for each in counted:
        settled.add(each, findings)
    assert findings == Findings()
    return settled.trainings, training.count_void(counted), len(counted)


def test_old_steps_that_do_not_count_stay_apart_from_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = keep_books()
    monkeypatch.setattr(audit_training, "MAX_SETTLEMENTS", 2)
    *books, steps = keep_books()
    assert (*books, 3) == whole
    assert steps == 2
