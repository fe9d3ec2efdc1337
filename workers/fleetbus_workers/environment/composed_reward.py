"""Rewards out of weighted components: around any environment, after its own verdict, a judge and `reward.weights`.

Above it are the worker and everything else that grades, which see one verdict; below it one environment and the judge. What
has no value leaves the episode without a reward, and the reason says what is missing.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from fleetbus.core.algorithms.reward_components import JUDGE, VERIFIER, combine, find_missing
from fleetbus_schemas import Action, ChatMessage, EpisodeRequested, Task, UntrainedTurn
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.base import (
    NO_LIMITS,
    Ahead,
    AsksAhead,
    Environment,
    HoldsElsewhere,
    LimitsTurns,
    LivesElsewhere,
    PacesItself,
    RecordedTurn,
    ReportsUntrained,
    ShowsWhole,
    Start,
    StartsInTurn,
    Step,
    TaskEnvironmentFactory,
    TurnLimits,
    Verdict,
)
from fleetbus_workers.environment.validation import validate_return
from fleetbus_workers.judge.failure import JudgeFailed
from fleetbus_workers.judge.prompts import format_transcript


class AsksJudge(Protocol):
    """Scores transcripts: a `Judge`, or what stands for it in a replay."""

    async def score(self, transcripts: Sequence[str]) -> list[float]:
        """One score per transcript, from 0 to 1; raises `JudgeFailed`."""


class ComposedRewardFactory:
    """Makes the environments of another factory with rewards of ``weights``. ``judge`` is asked if it has a weight; with
    ``judges_groups`` somebody else asks it, of whole groups, and verdicts come without its part and with a transcript."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        weights: Mapping[str, float],
        judge: AsksJudge | None,
        *,
        max_chars: int,
        judges_groups: bool = False,
    ) -> None:
        self._factory = factory
        self._make_for: Callable[[Task], Environment] = (
            factory.for_task if isinstance(factory, TaskEnvironmentFactory) else lambda _: factory()
        )
        self.weights = {name: weight for name, weight in weights.items() if name != JUDGE or not judges_groups}
        self.judge = judge if self.weights.get(JUDGE) else None
        self.judges_groups = judges_groups and bool(weights.get(JUDGE))
        self.max_chars = max_chars

    def __call__(self) -> Environment:
        return self._wrap(self._factory())

    def for_task(self, task: Task) -> Environment:
        return self._wrap(self._make_for(task))

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with self._factory.run():
            yield

    def _wrap(self, inner: Environment) -> Environment:
        return _KINDS[isinstance(inner, HoldsElsewhere), isinstance(inner, LivesElsewhere)](inner, self)


class ComposedRewardEnvironment:
    """One episode; calls are passed on unchanged, and what the policy saw and said is kept for the judge."""

    def __init__(self, inner: Environment, factory: ComposedRewardFactory) -> None:
        self.replayable = inner.replayable
        self._inner: Any = inner
        self._factory = factory
        self._seen: list[ChatMessage] = []

    @property
    def shows_whole(self) -> bool:
        """See `ShowsWhole`."""
        return isinstance(self._inner, ShowsWhole) and self._inner.shows_whole

    @property
    def paces_itself(self) -> bool:
        """See `PacesItself`."""
        return isinstance(self._inner, PacesItself) and self._inner.paces_itself

    @property
    def turn_limits(self) -> TurnLimits:
        """See `LimitsTurns`."""
        return self._inner.turn_limits if isinstance(self._inner, LimitsTurns) else NO_LIMITS

    @property
    def asks_ahead(self) -> bool:
        """See `AsksAhead`."""
        return isinstance(self._inner, AsksAhead) and self._inner.asks_ahead

    async def ask_ahead(self) -> Ahead | None:
        """See `AsksAhead`."""
        ahead: Ahead | None = await self._inner.ask_ahead()
        return ahead

    async def wait_to_start(self) -> None:
        """See `StartsInTurn`."""
        if isinstance(self._inner, StartsInTurn):
            await self._inner.wait_to_start()

    def list_untrained(self) -> tuple[UntrainedTurn, ...]:
        """See `ReportsUntrained`."""
        return self._inner.list_untrained() if isinstance(self._inner, ReportsUntrained) else ()

    @property
    def implementation(self) -> object:
        """The object that a failure is located in."""
        return getattr(self._inner, "implementation", self._inner)

    async def open(self, task: Task) -> None:
        await self._inner.open(task)

    async def reset(self) -> Start:
        start = validate_return(Start, await self._inner.reset(), "reset", self._inner)
        self._seen = list(start.messages) if self._is_judged else []
        return start

    async def step(self, action: Action) -> Step:
        step = validate_return(Step, await self._inner.step(action), "step", self._inner)
        if self._is_judged:
            self._seen += [ChatMessage(role="assistant", content=action.text), *step.messages]
        return step

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self._inner.state()
        return state

    async def verify(self) -> Verdict:
        """The weighted sum; without a reward if a component that counts has no value."""
        verdict = validate_return(Verdict, await self._inner.verify(), "verify", self._inner)
        components = dict(verdict.components)
        if verdict.reward is not None:
            components[VERIFIER] = verdict.reward
        weights, reason = self._factory.weights, verdict.reason
        if (judge := self._factory.judge) is not None and find_missing(components, weights) == [JUDGE]:
            try:
                (components[JUDGE],) = await judge.score([self._format_transcript()])
            except JudgeFailed as error:
                return Verdict(reward=None, reason=str(error), components=components)
        if missing := find_missing(components, weights):
            why = f": {reason}" if reason else ""
            reason = f"no value of {', '.join(missing)}{why}"
            return msgspec.structs.replace(verdict, reward=None, reason=reason, components=components)
        transcript = self._format_transcript() if self._factory.judges_groups else ""
        return msgspec.structs.replace(
            verdict, reward=combine(components, weights), components=components, transcript=transcript
        )

    async def close(self) -> None:
        await self._inner.close()

    @property
    def _is_judged(self) -> bool:
        return self._factory.judge is not None or self._factory.judges_groups

    def _format_transcript(self) -> str:
        return format_transcript(self._seen, self._factory.max_chars)


class _HoldingEnvironment(ComposedRewardEnvironment):
    """The same around one that holds something which outlives its worker."""

    @property
    def held(self) -> str:
        held: str = self._inner.held
        return held

    async def release(self, task: Task, held: str) -> None:
        await self._inner.release(task, held)


class _LivingElsewhere(ComposedRewardEnvironment):
    """The same around one whose other side does not end with its worker."""

    def assign(self, request: EpisodeRequested, attempt: int, recorded: Sequence[RecordedTurn]) -> None:
        self._inner.assign(request, attempt, recorded)


class _Both(_HoldingEnvironment, _LivingElsewhere):
    pass


_KINDS: dict[tuple[bool, bool], type[ComposedRewardEnvironment]] = {
    (False, False): ComposedRewardEnvironment,
    (True, False): _HoldingEnvironment,
    (False, True): _LivingElsewhere,
    (True, True): _Both,
}
"""By what the inner one is asked for: a worker distinguishes them by their methods."""
