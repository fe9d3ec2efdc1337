"""Training that counts: a fold of the `LineageStarted` entries of ``train.<name>`` (docs/concepts/delivery.md, rule 8). Pure.

Every learner that begins or takes over starts a lineage from a step of an earlier one; what that one trained after the step is
void. Resume, audit and trimming all ask here, so that they never disagree on what was trained.
"""

import re
from collections.abc import Mapping, Sequence

from fleetbus_schemas import LineageStarted

_NAME = re.compile(r"l(\d+)")


def lineage_number(name: str) -> int:
    """Of two lineages of a run the later one has the higher number; 0 for names that no learner of a run gives."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0


def complete_lineages(lineages: list[LineageStarted], lineage: str) -> list[LineageStarted]:
    """With the beginning of a lineage that the log no longer holds, of which it holds an entry: it comes before all others."""
    if any(started.lineage == lineage for started in lineages):
        return lineages
    missing = [started for started in lineages if not started.worker] + [LineageStarted(lineage=lineage, worker="")]
    known = [started for started in lineages if started.worker]
    return sorted(missing, key=lambda started: lineage_number(started.lineage)) + known


def compute_surviving_steps(lineages: Sequence[LineageStarted]) -> dict[str, float]:
    """The last step of each lineage that counts: the newest has no limit, each parent ends where its child began."""
    if not lineages:
        return {}
    by_name = {started.lineage: started for started in lineages}
    started: LineageStarted | None = lineages[-1]
    limit = float("inf")
    surviving: dict[str, float] = {}
    while started is not None and started.lineage not in surviving:
        surviving[started.lineage] = limit
        limit = min(limit, started.parent_step)
        started = by_name.get(started.parent)
    return surviving


def is_surviving(surviving: Mapping[str, float], lineage: str, step: int) -> bool:
    """True if the step of that lineage counts; steps of a lineage that was never started do not."""
    return step <= surviving.get(lineage, -1.0)
