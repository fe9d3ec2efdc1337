"""Logs once when the learning signal disappears, and once when it is back."""

import structlog

from fleetbus.core.learning_signal import LearningSignal
from fleetbus_schemas import StepTrained

log = structlog.get_logger()


class SignalLog:
    """Takes every step of this learner's lineage as it is trained."""

    def __init__(self) -> None:
        self._signal = LearningSignal()
        self._logged_kind = ""

    def record_step(self, step: StepTrained, now_ns: int) -> None:
        self._signal.apply(step, now_ns)
        found = self._signal.latest
        kind = found.kind if found is not None else ""
        if kind == self._logged_kind:
            return
        self._logged_kind = kind
        if found is None:
            log.info("learning signal has returned", step=step.step)
        elif found.kind == "solved":
            log.info(found.reason, advice=found.advice)
        else:
            log.warning(found.reason, advice=found.advice)
