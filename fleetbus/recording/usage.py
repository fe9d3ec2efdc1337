"""Tokens and calls of a run by use, hours by worker, seconds by environment: a fold of its log. Pure.

Memory follows the number of episodes. Actions that were trimmed from the log are missing in the tokens, and counted nowhere.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    LineageStarted,
    Message,
    StepTrained,
    TrainingFinished,
)
from fleetbus_schemas.tokens import count_tokens

STOPPED_SECONDS = 3600.0
"""A worker that the log says nothing of for longer is taken to have been stopped meanwhile."""

MOST_SECONDS = 1e9
"""Longer times than this, of 31 years, are no times."""

TRAINED, EVALUATION, OPEN, REPEATED = "trained", "evaluation", "not settled", "attempts that were superseded"


class Used(msgspec.Struct, kw_only=True):
    """``calls`` of the policy, which sampled ``sampled`` tokens after ``prompt`` new ones in ``call_seconds`` (sum over
    episodes that share an engine), and ``tool_calls`` of the environments."""

    episodes: int = 0
    calls: int = 0
    tool_calls: int = 0
    sampled: int = 0
    prompt: int = 0
    call_seconds: float = 0.0

    def add(self, other: Used) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class WorkerHours(msgspec.Struct, kw_only=True):
    """``hours`` between the first and the last entry of a worker, without gaps beyond `STOPPED_SECONDS`."""

    role: str
    worker: str
    hours: float


class EnvironmentSeconds(msgspec.Struct, kw_only=True):
    """Seconds of a finished episode of one environment key: the mean, and of it the means of its stages."""

    env: str
    episodes: int
    seconds: float
    stages: dict[str, float]


class Usage(msgspec.Struct, kw_only=True):
    """``by_use`` ends with nothing that is counted twice: its sum is all that was sampled. ``steps`` count."""

    steps: int
    hours: float
    by_use: dict[str, Used]
    workers: list[WorkerHours]
    environments: list[EnvironmentSeconds]


class _Span(msgspec.Struct):
    last_ns: int
    seconds: float = 0.0


class UsageFold:
    """Takes the messages of a log in its order, with the sequence and the time of each."""

    def __init__(self) -> None:
        self._acted: dict[str, dict[int, Used]] = {}
        self._results: dict[str, tuple[str, Used]] = {}
        self._open: dict[str, str] = {}
        self._repeated = Used()
        self._spans: dict[tuple[str, str], _Span] = {}
        self._lineages: list[LineageStarted] = []
        self._steps: list[StepTrained] = []
        self._last: TrainingFinished | None = None
        self._stages: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._played: Counter[str] = Counter()
        self._first_ns = self._last_ns = 0

    def apply(self, message: Message, sequence: int, time_ns: int) -> None:
        """Take one entry; messages that say nothing here are ignored."""
        self._first_ns, self._last_ns = self._first_ns or time_ns, time_ns
        match message:
            case EpisodeRequested():
                self._open.setdefault(message.episode_id, message.split)
            case AttemptStarted():
                self._see("environment", message.worker, time_ns)
            case Action():
                self._see("inference", message.worker, time_ns)
                self._acted.setdefault(message.episode_id, {})[sequence] = Used(
                    calls=1,
                    sampled=count_tokens(message.sampled),
                    prompt=count_tokens(message.prompt_delta),
                    call_seconds=_finite(message.seconds_generating),
                )
            case EpisodeFinished():
                self._see("environment", message.worker, time_ns)
                self._add_result(message)
            case LineageStarted():
                self._lineages.append(message)
                self._see("learner", message.worker, time_ns)
            case StepTrained():
                self._steps.append(message)
                self._see("learner", self._lineages[-1].worker if self._lineages else "", time_ns)
            case TrainingFinished():
                self._last = message

    def build(self) -> Usage:
        """The usage as of now."""
        surviving = compute_surviving_steps(self._lineages)
        steps = [step for step in self._steps if is_surviving(surviving, step.lineage, step.step)]
        reasons = {each.episode_id: each.reason for step in steps for each in step.excluded}
        reasons |= {each.episode_id: each.reason for each in self._last.excluded} if self._last is not None else {}
        trained = {episode for step in steps for episode in step.episodes}
        by_use: defaultdict[str, Used] = defaultdict(Used)
        for episode, (split, used) in self._results.items():
            settled = TRAINED if episode in trained else f"excluded: {reasons[episode]}" if episode in reasons else OPEN
            by_use[EVALUATION if split == "eval" else settled].add(used)
        for episode in self._open:
            by_use[OPEN].add(_sum(self._acted.get(episode, {}).values(), episodes=1))
        by_use[REPEATED].add(self._repeated)
        for episode in self._acted.keys() - self._open.keys():  # sampled after the result, or of a request that is trimmed
            by_use[REPEATED if episode in self._results else OPEN].add(_sum(self._acted[episode].values()))
        ordered = sorted(by_use.items(), key=lambda each: (each[0] != TRAINED, -each[1].sampled))
        return Usage(
            steps=len(steps),
            hours=(self._last_ns - self._first_ns) / 3.6e12,
            by_use={use: used for use, used in ordered if used.calls or used.episodes},
            workers=[
                WorkerHours(role=role, worker=worker, hours=span.seconds / 3600)
                for (role, worker), span in sorted(self._spans.items())
            ],
            environments=[self._build_environment(env) for env in sorted(self._played)],
        )

    def _add_result(self, result: EpisodeFinished) -> None:
        acted = self._acted.pop(result.episode_id, {})
        self._open.pop(result.episode_id, None)
        if result.episode_id in self._results:
            return
        named = {reference.sequence for reference in result.actions}
        counted = _sum([used for sequence, used in acted.items() if sequence in named], episodes=1)
        counted.tool_calls = result.tool_calls
        self._results[result.episode_id] = result.split, counted
        self._repeated.add(_sum([used for sequence, used in acted.items() if sequence not in named]))
        self._played[result.env] += 1
        self._stages[result.env].update({stage: _finite(seconds) for stage, seconds in result.timings.items()})

    def _build_environment(self, env: str) -> EnvironmentSeconds:
        count = self._played[env]
        stages = {stage: seconds / count for stage, seconds in self._stages[env].items()}
        return EnvironmentSeconds(env=env, episodes=count, seconds=math.fsum(stages.values()), stages=stages)

    def _see(self, role: str, worker: str, time_ns: int) -> None:
        span = self._spans.setdefault((role, worker), _Span(time_ns))
        passed = (time_ns - span.last_ns) / 1e9
        span.seconds += passed if 0 < passed <= STOPPED_SECONDS else 0.0
        span.last_ns = time_ns


def _sum(parts: Iterable[Used], episodes: int = 0) -> Used:
    total = Used(episodes=episodes)
    for part in parts:
        total.add(part)
    return total


def _finite(value: float) -> float:
    return value if 0 < value <= MOST_SECONDS else 0.0
