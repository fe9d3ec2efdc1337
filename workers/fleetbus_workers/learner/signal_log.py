"""The learner says in its log when training has nothing to learn from any more, and when it has again: once each."""

from __future__ import annotations

import structlog

from fleetbus.core.learning_signal import LearningSignal
from fleetbus_schemas import StepTrained

log = structlog.get_logger()


class SignalLog:
    """Fed with every step of this learner's lineage, as it is trained."""

    def __init__(self) -> None:
        self._signal = LearningSignal()
        self._said = ""

    def trained(self, step: StepTrained, now_ns: int) -> None:
        self._signal.apply(step, now_ns)
        found = self._signal.latest
        kind = found.kind if found is not None else ""
        if kind == self._said:
            return
        self._said = kind
        if found is None:
            log.info("there is something to learn from again", step=step.step)
        elif found.kind == "solved":
            log.info(found.reason, advice=found.advice)
        else:
            log.warning(found.reason, advice=found.advice)
