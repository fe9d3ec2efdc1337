"""Progress as text: the lines that `up` prints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fleetbus.core.training.evaluation_summary import find_interval
from fleetbus_schemas import GRADED, EvaluationFinished, WorkerRole

if TYPE_CHECKING:
    from fleetbus_workers.observe.run.progress import Progress

STAGE_PREFIX = "seconds_"
"""Metrics of a step that are times of a stage begin like this."""

STALENESS_PREFIX = "staleness_"
"""Metrics of a step that say how old its samples were begin like this."""

TIMED_EPISODES = 8
"""From so many held-out episodes on their rate says how long the others take."""


def format_step(progress: Progress) -> str:
    """One training step with all that is known of it: ``step 3/50 · success 0.41 · ...``."""
    episodes, tokens = progress.rates()
    parts = _list_step_parts(progress, _list_metric_parts(progress.metrics))
    if episodes:
        parts.append(f"{_format_short(episodes)} episodes/s, {format_count(tokens)} tokens/s")
    return " · ".join([*parts, *filter(None, [format_stage_times(progress.metrics), format_failures(progress)])])


def format_step_short(progress: Progress) -> str:
    """The same for 80 columns, without times, tokens and exclusions (shown below it); a reward equal to the success is left
    out."""
    measured = _list_metric_parts(progress.metrics)
    alike = len({text.split()[1] for text in measured}) == 1
    episodes, _ = progress.rates()
    parts = _list_step_parts(progress, measured[:1] if alike else measured)
    return " · ".join([*parts, *([f"{_format_short(episodes)} episodes/s"] if episodes else [])])


def format_evaluation(evaluation: EvaluationFinished) -> str:
    """One evaluation: ``held out, start: success 31.2% of 256 episodes, mean reward 0.412 (sampled, 95%:
    25.8-37.1%)``."""
    how = "greedy" if evaluation.temperature == 0 else "sampled"
    name = evaluation.name.replace("_", " ")
    if not evaluation.graded:
        return f"held out, {name}: not measured, for none of {evaluation.episodes} episodes has a grade ({how})"
    unplayed = evaluation.episodes - evaluation.graded
    missing = f", {unplayed} without a grade" if unplayed else ""
    if unplayed and evaluation.successes >= 0:
        missing += f": success {evaluation.success_of_all:.1%} of all {evaluation.episodes}"
    of = f" of {evaluation.tasks} tasks" if 0 < evaluation.tasks < evaluation.episodes else ""
    measured = f"success {evaluation.success:.1%} of {evaluation.graded} episodes{of}, mean reward {evaluation.mean_reward:.3f}"
    between = format_interval(find_interval(evaluation.success, evaluation.graded, evaluation.tasks))
    return f"held out, {name}: {measured} ({how}, 95%: {between}{missing})"


def format_interval(interval: tuple[float, float]) -> str:
    """``25.8-37.1%``."""
    return f"{100 * interval[0]:.1f}-{interval[1]:.1%}"


def format_evaluation_progress(progress: Progress) -> str:
    """``held out: 64 of 256 episodes, about 12 s left``; empty while nothing is evaluated."""
    played, asked = progress.evaluated, progress.evaluation_episodes
    if not 0 < played < asked:
        return ""
    episodes, _ = progress.rates()
    left = f", about {format_duration((asked - played) / episodes)} left" if episodes and played >= TIMED_EPISODES else ""
    return f"held out: {played} of {asked} episodes{left}"


def format_stage_times(metrics: Mapping[str, float]) -> str:
    """The seconds of each stage: ``wait 0.6 s, train 0.5 s``."""
    stages = {key.removeprefix(STAGE_PREFIX): value for key, value in metrics.items() if key.startswith(STAGE_PREFIX)}
    return ", ".join(f"{stage.replace('_', ' ')} {_format_short(seconds)} s" for stage, seconds in stages.items())


def format_failures(progress: Progress) -> str:
    """``not trained so far: stale 12``: episodes without a grade and those settled untrained; empty if there are none."""
    ungraded = {outcome: count for outcome, count in progress.outcomes.items() if outcome not in GRADED}
    reasons = {**progress.training.excluded, **ungraded}
    counted = [f"{reason.replace('_', ' ')} {count}" for reason, count in sorted(reasons.items()) if count]
    return " ".join(f"not trained so far: {', '.join(counted)}".split()) if counted else ""


def in_flight(role: WorkerRole, count: int, slots: int) -> str:
    """The work that a worker holds: ``12/64`` of its slots; a learner has no slots to fill, so ``32 groups``."""
    if not slots:
        return ""
    return f"{count} groups" if role == "learner" else f"{count}/{slots}"


def format_count(count: float) -> str:
    """``6.5k`` for 6,512."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:.0f}"


def format_bytes(count: float) -> str:
    """``6.5 kB`` for 6,512."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """``1 min 41 s`` for 101 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h" if hours else "", f"{minutes} min" if minutes else "", f"{rest} s" if not hours else ""]
    return " ".join(filter(None, parts))


def _format_short(number: float) -> str:
    """Two digits, never fewer than are left of the point: ``0.64``, ``6.4``, ``64``, ``114``."""
    return f"{number:.2g}" if number < 9.95 else f"{number:.0f}"


def _list_step_parts(progress: Progress, measured: list[str]) -> list[str]:
    parts = [f"step {progress.step}/{progress.steps}", *measured, f"version {progress.version}"]
    if "staleness_max" in progress.metrics:
        parts.append(f"staleness {progress.metrics['staleness_max']:.0f}")
    return parts


def _list_metric_parts(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {metrics[name]:.2f}" for name in ("success", "reward") if name in metrics]
