"""Scores of a judge for whole groups, given when a batch is formed: what the others of the group did is part of the grade.

The rewards that are trained stand in `StepTrained.rewards`. A group without scores is not trained, with the reason; a learner
that is killed before its step is stored asks again, or finds the judge's answers where they are kept.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import msgspec
import structlog

from fleetbus.core.algorithms.reward_components import JUDGE, find_reward_problem
from fleetbus.core.training.groups import Group
from fleetbus.delivery.control import run_until_drained
from fleetbus_schemas import EpisodeFinished
from fleetbus_workers.judge.failure import JudgeFailed

NO_SCORE, NO_TRANSCRIPT = "judge_failed", "no_transcript"

log = structlog.get_logger()


class ScoresTranscripts(Protocol):
    """A `fleetbus_workers.judge.client.Judge`."""

    async def score(self, transcripts: Sequence[str]) -> list[float]: ...


class JudgedReward(msgspec.Struct, frozen=True, kw_only=True):
    """The trained part of an episode, and the judge's score in it (None: it is not known)."""

    reward: float
    score: float | None


class GroupJudge:
    """``weight`` is that of the judge's score in the reward. Without a ``judge`` rewards stay as they are."""

    def __init__(self, judge: ScoresTranscripts | None = None, *, weight: float = 1.0, max_abs_reward: float = 1e6) -> None:
        self._judge = judge
        self._weight = weight
        self._max_abs_reward = max_abs_reward

    @property
    def weight(self) -> float:
        """That of the judge's score; 0 without a judge."""
        return self._weight if self._judge is not None else 0.0

    async def grade(self, groups: Sequence[Group], drain: anyio.Event) -> dict[str, JudgedReward]:
        """Add the score to every graded result of ``groups``, all groups at once; the rewards by episode. What has no score
        becomes unusable in its group. Ends early when ``drain`` is set."""
        if self._judge is None or not self._weight:
            return {}
        await run_until_drained(drain, self._grade_all, self._judge, groups)
        return _list_judged(groups)

    async def _grade_all(self, judge: ScoresTranscripts, groups: Sequence[Group]) -> None:
        async with anyio.create_task_group() as tasks:
            for group in groups:
                if not any(JUDGE in result.reward_components for result in group.graded):  # it was, for a batch that was not
                    tasks.start_soon(self._grade_group, judge, group)

    async def _grade_group(self, judge: ScoresTranscripts, group: Group) -> None:
        for result in group.graded:
            if not result.transcript:  # from a worker without these settings
                group.unusable[result.episode_id] = NO_TRANSCRIPT
        graded = group.graded
        if not graded:
            return
        try:
            scores = await judge.score([result.transcript for result in graded])
        except JudgeFailed as error:
            log.warning("judge gives no scores; leaving the group out", group=group.group_id, reason=str(error))
            group.unusable |= dict.fromkeys((result.episode_id for result in graded), NO_SCORE)
            return
        for result, score in zip(graded, scores, strict=True):
            self._add_score(group, result, score)

    def _add_score(self, group: Group, result: EpisodeFinished, score: float) -> None:
        reward = (result.reward or 0.0) + self._weight * score
        if problem := find_reward_problem([reward], self._max_abs_reward):
            group.unusable[result.episode_id] = problem
        components = result.reward_components | {JUDGE: score}
        group.results[result.episode_id] = msgspec.structs.replace(result, reward=reward, reward_components=components)


class RecordedGroupJudge(GroupJudge):
    """Rewards as they are recorded: ``find_judged`` gives that of an episode, None if it was not trained."""

    def __init__(self, find_judged: Callable[[str], JudgedReward | None]) -> None:
        super().__init__()
        self._find_judged = find_judged

    async def grade(self, groups: Sequence[Group], drain: anyio.Event) -> dict[str, JudgedReward]:
        await anyio.lowlevel.checkpoint()
        for group in groups:
            for result in group.graded:
                judged = self._find_judged(result.episode_id)
                if judged is None:
                    group.unusable[result.episode_id] = NO_SCORE
                    continue
                components = result.reward_components | ({JUDGE: judged.score} if judged.score is not None else {})
                group.results[result.episode_id] = msgspec.structs.replace(
                    result, reward=judged.reward, reward_components=components
                )
        return _list_judged(groups)


def _list_judged(groups: Sequence[Group]) -> dict[str, JudgedReward]:
    return {
        result.episode_id: JudgedReward(reward=float(result.reward or 0.0), score=result.reward_components.get(JUDGE))
        for group in groups
        for result in group.graded
    }
