"""The facts that a diagnosis is made of: episodes and steps of a run, as its log tells them. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import msgspec

from fleetbus_schemas import GRADED


class EpisodeFacts(msgspec.Struct, kw_only=True):
    """One training episode that has ended. ``worker`` is the environment worker, ``replicas`` the inference workers by the
    tokens that each sampled. ``surprise`` is the sum of -log p over ``sampled`` tokens as the sampler says. ``reason`` is why
    it was not trained; empty: it was, or is not settled. ``seconds`` are those of its stages."""

    episode_id: str
    group_id: str
    task: str
    worker: str
    outcome: str
    reward: float | None
    is_success: bool
    turns: int
    tokens: int
    seconds: float
    sampled: int = 0
    surprise: float = 0.0
    replicas: dict[str, int] = msgspec.field(default_factory=dict)
    is_off_settings: bool = False
    """Requested with another temperature than the run's settings name, or with settings that distort the distribution."""
    reason: str = ""
    trained_reward: float | None = None
    """The reward after a judge of groups; None: the same."""

    @property
    def is_graded(self) -> bool:
        return self.outcome in GRADED and self.reward is not None

    @property
    def length(self) -> int:
        """Sampled tokens where the log still holds them, else all tokens."""
        return self.sampled or self.tokens

    @property
    def replica(self) -> str:
        """The inference worker of most of its tokens; empty: unknown."""
        return max(sorted(self.replicas), key=self.replicas.__getitem__, default="")


class PhraseShare(msgspec.Struct, frozen=True):
    """Of one step: the shares of its rewarded episodes and of all that have a phrase, the mean reward with it and without it
    (NaN where all have it), and the number of tasks in which it was said."""

    rewarded: float
    all: float
    reward: float
    other_reward: float
    tasks: int


class StepPhrases(msgspec.Struct, kw_only=True):
    """Phrases by text; a step with too few rewarded episodes has none, and is not ``measured``."""

    measured: bool = False
    shares: dict[str, PhraseShare] = msgspec.field(default_factory=dict)


class StepFacts(msgspec.Struct, kw_only=True):
    """One step of the surviving lineage: what it trained, what was settled without since the step before, what was measured.
    ``differences``: by episode the mean size of sampler's less trainer's log-probability under the same weights."""

    step: int
    metrics: dict[str, float]
    time_ns: int = 0
    trained: list[EpisodeFacts] = msgspec.field(default_factory=list)
    excluded: list[EpisodeFacts] = msgspec.field(default_factory=list)
    differences: dict[str, float] = msgspec.field(default_factory=dict)
    phrases: StepPhrases = msgspec.field(default_factory=StepPhrases)

    @property
    def settled(self) -> list[EpisodeFacts]:
        return [*self.trained, *self.excluded]


class PromptFacts(msgspec.Struct, kw_only=True):
    """One first prompt as text, and by replica the token sequences (digests) that it became, with the episodes."""

    rendered: dict[str, dict[bytes, list[str]]] = msgspec.field(default_factory=dict)


class RunFacts(msgspec.Struct, kw_only=True, dict=True):
    """A run up to some entry of its log. ``settings`` are those of the newest lineage, by table and key."""

    steps: list[StepFacts]
    settings: Mapping[str, Mapping[str, bool | int | float | str]]
    prompts: list[PromptFacts]

    @cached_property
    def step_of(self) -> dict[str, int]:
        """By episode the step that settled it."""
        return {each.episode_id: step.step for step in self.steps for each in step.settled}

    @cached_property
    def episodes(self) -> list[EpisodeFacts]:
        """All that are settled."""
        return [each for step in self.steps for each in step.settled]

    @cached_property
    def tasks(self) -> dict[str, list[EpisodeFacts]]:
        """Settled episodes by task."""
        found: defaultdict[str, list[EpisodeFacts]] = defaultdict(list)
        for each in self.episodes:
            found[each.task].append(each)
        return dict(found)

    def list_metric(self, name: str) -> dict[int, float]:
        """A measurement of each step; NaN where there is none."""
        return {step.step: step.metrics.get(name, math.nan) for step in self.steps}

    def list_shares(
        self, what: Callable[[EpisodeFacts], bool], among: Callable[[EpisodeFacts], bool] = lambda each: True
    ) -> dict[int, float]:
        """By step the share of settled episodes that ``what`` is true of, ``among`` some of them."""
        return {step.step: mean_of(what(each) for each in step.settled if among(each)) for step in self.steps}

    def read_setting(self, table: str, name: str) -> float | None:
        """A number of the settings; None if the log does not say."""
        value = self.settings.get(table, {}).get(name)
        return float(value) if isinstance(value, (int, float)) else None


def mean_of(values: Iterable[float]) -> float:
    """Their mean; NaN of none, and of those that have no finite sum."""
    known = list(values)
    try:
        return math.fsum(known) / len(known) if known else math.nan
    except (OverflowError, ValueError):
        return math.nan
