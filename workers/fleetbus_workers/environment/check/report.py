"""Plays one task for `fleetbus check`: an episode, the same one again, the oracle's, and one in which nothing is done."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus_schemas import Task
from fleetbus_workers.environment.base import Environment, TaskEnvironmentFactory
from fleetbus_workers.environment.check.episode import PlayedEpisode, Problem, play_episode
from fleetbus_workers.environment.check.policies import Policy, build_scripted_policy, find_oracle


class CheckReport(msgspec.Struct, kw_only=True):
    """``episode`` was played with the chosen policy. ``oracle`` and ``idle`` are rewards, None if they were not measured."""

    task: str
    replayable: bool
    episode: PlayedEpisode
    oracle: float | None = None
    idle: float | None = None
    problems: list[Problem] = []

    @property
    def has_failed(self) -> bool:
        return any(problem.is_failure for problem in self.problems)


async def check_task(factory: Any, task: Task, policy: Policy, configuration: Configuration, *, turns: int) -> CheckReport:
    """Play the task with ``policy``, then its actions again, its oracle, and nothing at all."""
    make: Callable[[], Environment] = (
        partial(factory.for_task, task) if isinstance(factory, TaskEnvironmentFactory) else factory
    )
    play = partial(play_episode, make, task, configuration=configuration, turns=turns)
    episode = await play(policy)
    report = CheckReport(task=task.key, replayable=False, episode=episode, problems=list(episode.problems))
    if episode.has_failed:
        return report
    report.replayable = bool(getattr(make(), "replayable", False))
    again = await play(build_scripted_policy([exchange.said for exchange in episode.exchanges]))
    report.problems += _compare(episode, again, is_replayable=report.replayable)
    idle = await play(build_scripted_policy([]))
    report.problems += [problem for problem in idle.problems if problem not in report.problems]
    report.idle = _read_reward(idle)
    threshold = configuration.evaluation.success_threshold
    if (actions := find_oracle(task)) is not None:
        solved = await play(build_scripted_policy(actions))
        report.oracle = _read_reward(solved)
        report.problems += [problem for problem in solved.problems if problem not in report.problems]
        if report.oracle is None or report.oracle < threshold:
            text = f"the task's oracle is rewarded {_format(report.oracle)}; a success is {threshold:g} or more"
            report.problems.append(Problem(text=text))
    if report.idle is not None and report.idle >= threshold:
        text = f"doing nothing is rewarded {report.idle:g}: a success without any action"
        report.problems.append(Problem(text=text, is_failure=False))
    return report


def _compare(first: PlayedEpisode, again: PlayedEpisode, *, is_replayable: bool) -> list[Problem]:
    """Problems where the same actions led to other observations or rewards, against what ``replayable`` says."""
    difference = _find_difference(first, again)
    if difference and is_replayable:
        advice = "set replayable = False, or take all randomness from the task's seed"
        return [Problem(text=f"replayable is True, but {difference}: {advice}")]
    if not difference and not is_replayable:
        text = "the same actions led to the same observations twice: with replayable = True episodes survive their worker"
        return [Problem(text=text, is_failure=False)]
    return []


def _find_difference(first: PlayedEpisode, again: PlayedEpisode) -> str:
    if again.has_failed:
        return f"the same actions failed the second time ({again.problems[0].text})"
    for turn, (one, other) in enumerate(zip(first.exchanges, again.exchanges, strict=False)):
        if one != other:
            what = "the observation" if one.messages != other.messages else "the reward"
            return f"{what} of turn {turn} differed when the same actions were played again"
    if (first.last, first.ending) != (again.last, again.ending):
        return "the episode ended differently when the same actions were played again"
    return "" if _read_reward(first) == _read_reward(again) else "the same actions were graded differently"


def _read_reward(episode: PlayedEpisode) -> float | None:
    return episode.verdict.reward if episode.verdict is not None and not episode.has_failed else None


def _format(reward: float | None) -> str:
    return "nothing" if reward is None else f"{reward:g}"
