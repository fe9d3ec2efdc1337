"""The result of an episode: what was played, and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetbus.core.episode.history import Turn, loss_mask
from fleetbus.core.training.evaluation_summary import success_in
from fleetbus_schemas import GRADED, AttemptStarted, EpisodeFinished, EpisodeRequested, EpisodeSegment, UntrainedTurn
from fleetbus_schemas.tokens import pack_mask
from fleetbus_workers.environment.base import Step
from fleetbus_workers.environment.episode.conclusion import Conclusion, describe_seats
from fleetbus_workers.environment.episode.seats import EpisodeSeats, add_unseated, add_versions
from fleetbus_workers.environment.episode.stages import to_printable
from fleetbus_workers.environment.normalization import INFO_BYTES, clip_text, clip_values, format_text

LAST_OBSERVATION_BYTES = 2048


def build_result(
    request: EpisodeRequested,
    claim: AttemptStarted,
    conclusion: Conclusion,
    *,
    turns: Sequence[Turn],
    turn_rewards: Sequence[float],
    timings: Mapping[str, float],
    tools: tuple[int, int],
    last: Step,
    seats: EpisodeSeats,
    segments: tuple[EpisodeSegment, ...],
    untrained: Sequence[UntrainedTurn],
) -> EpisodeFinished:
    """The result of one attempt. ``tools``: how many were called, and how many of those calls failed; ``last``: the last step,
    or an empty one; ``untrained``: turns that the environment wants left out, of which those that were played count."""
    left_out = tuple(each for each in untrained if each.turn < len(turns))
    if (described := describe_seats(conclusion, seats)) and conclusion.outcome in GRADED:
        left_out = add_unseated(left_out, described)
    mask = loss_mask(turns, {each.turn for each in left_out})
    info = clip_values(last.info, INFO_BYTES)
    return EpisodeFinished(
        episode_id=request.episode_id,
        group_id=request.group_id,
        attempt=claim.attempt,
        outcome=conclusion.outcome,
        worker=claim.worker,
        split=request.split,
        task_key=request.task.key,
        dataset_version=request.task.dataset_version,
        env=request.task.env,
        request_sequence=claim.request_sequence,
        error_class=conclusion.error_class,
        error=conclusion.error,
        reward=conclusion.reward,
        turn_rewards=tuple(turn_rewards),
        turns=len(turns),
        actions=tuple(turn.reference for turn in turns),
        tokens=len(mask),
        loss_mask=pack_mask(mask),
        timings={stage: round(seconds, 6) for stage, seconds in timings.items()},
        tool_calls=tools[0],
        tool_errors=tools[1],
        attempts=claim.attempt,
        policy_versions=seats.list_own_versions(turns),
        success=success_in(info),
        info=info,
        last_observation=to_printable(clip_text(format_text(last.messages), LAST_OBSERVATION_BYTES)),
        error_location=conclusion.location,
        traceback=conclusion.traceback,
        note=conclusion.note,
        segments=segments,
        reward_components=conclusion.components,
        transcript=conclusion.transcript,
        untrained=left_out,
        seats=add_versions(described, turns),
    )
