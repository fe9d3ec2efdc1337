"""A judge in a replay: nobody is asked, the recorded score is what it said.

An environment is graded before anybody knows which episode it plays, so a placeholder stands for the score until the result is
compared.
"""

from collections.abc import Iterable, Sequence

import msgspec

from fleetbus.core.algorithms.reward_components import JUDGE, combine, parse_weights
from fleetbus_schemas import GRADED, EpisodeFinished, StepTrained
from fleetbus_workers.learner.group_judge import JudgedReward, RecordedGroupJudge
from fleetbus_workers.replay.driver import ReplayContext

FAILED = "judge: "
"""What the error of an episode begins with that the judge did not score."""


class RecordedJudge:
    """Scores everything 0."""

    async def score(self, transcripts: Sequence[str]) -> list[float]:
        return [0.0] * len(transcripts)


def find_recorded_judge(context: ReplayContext) -> RecordedJudge | None:
    """Find a stand-in for the judge that scored the episodes of a recording, None if none did."""
    recorded = context.recording.header.configuration.get("reward", {})
    return RecordedJudge() if recorded.get("judge_url") and recorded.get("judge_mode") != "group" else None


def is_without_score(result: EpisodeFinished) -> bool:
    """True if the judge failed: that had no cause in environment or policy."""
    return result.outcome == "verifier_unknown" and result.error.startswith(FAILED)


def take_recorded_score(recorded: EpisodeFinished, replayed: EpisodeFinished, weights: str) -> EpisodeFinished:
    """``replayed`` with the judge's score of ``recorded``, and the reward that follows."""
    if JUDGE not in recorded.reward_components or JUDGE not in replayed.reward_components or replayed.outcome not in GRADED:
        return replayed
    components = replayed.reward_components | {JUDGE: recorded.reward_components[JUDGE]}
    reward = combine(components, parse_weights(weights, judged=True))
    return msgspec.structs.replace(replayed, reward=reward, reward_components=components)


def find_recorded_group_judge(steps: Iterable[StepTrained]) -> RecordedGroupJudge | None:
    """The rewards of groups that a judge scored, None if it scored none."""
    judged = {
        episode: JudgedReward(reward=reward, score=step.scores.get(episode))
        for step in steps
        for episode, reward in step.rewards.items()
    }
    return RecordedGroupJudge(judged.get) if judged else None
