"""Messages of a run, as a progress reads them."""

from __future__ import annotations

from fleetbus_schemas import EpisodeFinished, EvaluationFinished, Exclusion, Outcome, StepTrained

SECOND_NS = 1_000_000_000


def trained(step: int, *, lineage: str = "a", excluded: tuple[str, ...] = (), **metrics: float) -> StepTrained:
    exclusions = tuple(Exclusion(episode_id=f"x{step}-{index}", reason=reason) for index, reason in enumerate(excluded))
    ids = (f"{lineage}{step}-0", f"{lineage}{step}-1")
    return StepTrained(lineage=lineage, step=step, version=step, episodes=ids, excluded=exclusions, metrics=metrics)


def finished(episode: int, outcome: Outcome = "completed", **fields: float) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id=f"e{episode}", group_id="g", attempt=1, outcome=outcome, worker="w", tokens=100, timings=fields
    )


def evaluated(name: str, success: float, step: int = 0, lineage: str = "a", temperature: float = 1.0) -> EvaluationFinished:
    return EvaluationFinished(
        lineage=lineage, step=step, version=step, name=name, episodes=10, graded=8, success=success, mean_reward=success,
        temperature=temperature,
    )  # fmt: skip
