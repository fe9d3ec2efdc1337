"""The reward curve of a run as a PNG. The only module that imports matplotlib, and only when a picture is drawn."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from fleetbus_workers.up.summary_builder import Summary

SMOOTHING_STEPS = 5
"""The smoothed line is the mean of this many steps around each one."""

_POINT, _LINE, _START, _END = "#9db8d9", "#1f5fa8", "#8a8a8a", "#2e7d32"
_OTHERS = ("#b4491b", "#7b3fb5", "#8a5a00", "#0f7c86", "#a3296f")


def draw_reward_chart(summary: Summary, file: Path) -> None:
    """Draw reward per step, smoothed, that of each further policy, and the held-out successes before and after. Raises
    `ModuleNotFoundError` without matplotlib; draws nothing when no step was trained."""
    points = [(step, reward) for step, reward in zip(summary.steps, summary.reward_by_step, strict=True) if reward is not None]
    if not points:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_curve(axes, [step for step, _ in points], [reward for _, reward in points])
    for colour, (policy, other) in zip(cycle(_OTHERS), summary.policies.items(), strict=False):
        _draw_other(axes, policy, other, colour)
    _draw_held_out(axes, summary, points[-1][0])
    _label(axes, summary)
    temporary = file.with_name(file.name + ".part")
    figure.savefig(temporary, format="png")
    temporary.replace(file)


def smooth(values: Sequence[float]) -> list[float]:
    """The centred mean of up to `SMOOTHING_STEPS` neighbours; the window shrinks at both ends."""
    half = SMOOTHING_STEPS // 2
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _draw_curve(axes: Any, steps: Sequence[int], rewards: Sequence[float]) -> None:
    axes.plot(steps, rewards, "o", markersize=3.5, color=_POINT, label="training batch", clip_on=False)
    if len(steps) > SMOOTHING_STEPS:
        axes.plot(steps, smooth(rewards), linewidth=2.2, color=_LINE, label=f"mean of {SMOOTHING_STEPS} steps")


def _draw_other(axes: Any, policy: str, summary: Summary, colour: str) -> None:
    points = [(step, reward) for step, reward in zip(summary.steps, summary.reward_by_step, strict=True) if reward is not None]
    rewards = smooth([reward for _, reward in points])
    axes.plot(
        [step for step, _ in points], rewards, linewidth=1.8, color=colour, label=f"{policy}, mean of {SMOOTHING_STEPS} steps"
    )


def _draw_held_out(axes: Any, summary: Summary, last_step: int) -> None:
    marks = (
        ("held out, start", summary.success_start, 0, _START, "D"),
        ("held out, end", summary.success_end, last_step, _END, "D"),
        ("held out, end, greedy", summary.success_end_greedy, last_step, _END, "*"),
    )
    for label, success, step, colour, marker in marks:
        if success is not None:
            style = {"markersize": 12 if marker == "*" else 7, "color": colour, "zorder": 5, "clip_on": False}
            axes.plot([step], [success], marker, label=f"{label}: {success:.1%}", **style)


def _label(axes: Any, summary: Summary) -> None:
    axes.set_title(f"Run {summary.run}: reward per training step", loc="left")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward, share of successes")
    trainings = (summary, *summary.policies.values())
    axes.set_xlim(left=0, right=max(step for each in trainings for step in each.steps))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if all(reward is None or 0 <= reward <= 1 for each in trainings for reward in each.reward_by_step):
        axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
