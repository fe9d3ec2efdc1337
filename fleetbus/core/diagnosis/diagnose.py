"""The diagnosis of a run: every check over the facts that `fleetbus.core.diagnosis.fold` made of its log. Pure."""

from __future__ import annotations

import msgspec

from fleetbus.core.diagnosis.engine_checks import check_engine, check_lag
from fleetbus.core.diagnosis.episode_checks import check_length, check_reward_of_length, check_truncation
from fleetbus.core.diagnosis.facts import RunFacts
from fleetbus.core.diagnosis.findings import Diagnosis, sort_findings
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.phrase_checks import check_phrases
from fleetbus.core.diagnosis.progress_checks import check_entropy, check_reward, check_updates
from fleetbus.core.diagnosis.speed_checks import check_speed
from fleetbus.core.diagnosis.task_checks import check_dropped, check_groups, check_tasks
from fleetbus.core.diagnosis.worker_checks import check_workers

CHECKS = (
    check_engine,
    check_lag,
    check_workers,
    check_dropped,
    check_phrases,
    check_reward_of_length,
    check_tasks,
    check_groups,
    check_truncation,
    check_length,
    check_updates,
    check_entropy,
    check_reward,
    check_speed,
)


def diagnose(run: RunFacts) -> Diagnosis:
    """Find all that is wrong with the run as of its newest step, and since when."""
    looking, times = Looking(), {step.step: step.time_ns for step in run.steps}
    for check in CHECKS if run.steps else ():
        check(run, looking)
    return Diagnosis(
        first_step=run.steps[0].step if run.steps else 0,
        last_step=run.steps[-1].step if run.steps else 0,
        episodes=len(run.episodes),
        findings=sort_findings([msgspec.structs.replace(each, time_ns=times[each.step]) for each in looking.findings]),
        measures=tuple(looking.measures),
        unmeasured=tuple(looking.unmeasured) if run.steps else ("everything: no step was trained yet",),
    )
