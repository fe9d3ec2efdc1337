"""Runs as rows for analysis: the tokens of each episode, the metrics of each step. Folds of log entries; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.episodes import Transcript, read_transcript
from fleetbus.recording.token_record import TrainedTokens, TrainerColumns, spread_over
from fleetbus_schemas import EpisodeFinished, LineageStarted, StepTrained, Subjects
from fleetbus_schemas.tokens import count_tokens, take_tokens, unpack_ids, unpack_logprobs

NO_VERSION = -1
"""The policy version of a token that the policy did not sample."""


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one episode in the order in which they were sampled, never re-tokenised.

    ``ids``, ``mask``, ``logprobs`` and ``versions`` have the same length: token ids; True for the policy's own; log-probability
    under the sampling temperature (0.0 where the mask is False); policy version that sampled it (-1 where the mask is False).
    ``reward`` is None unless the episode was graded: never train on such an episode.

    ``trainer_logprobs``, ``gradients`` and ``clipped`` are of the same length, too, and say of each trained token what
    `fleetbus.recording.token_record.TrainedTokens` has of it; NaN, NaN and False of the others. Empty without a token record.
    ``trained_version`` is that of the weights that the step began with, -1 then.
    """

    episode_id: str
    task_key: str
    outcome: str
    reward: float | None
    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    trainer_logprobs: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()
    clipped: tuple[bool, ...] = ()
    trained_version: int = NO_VERSION


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One training step that counts. ``episodes`` were trained, ``excluded`` settled without. ``time_ns`` is the log's (since
    1970). ``metrics``: `reward`, `success`, `loss` and the learner's others."""

    step: int
    version: int
    lineage: str
    time_ns: int
    episodes: int
    excluded: int
    metrics: dict[str, float]


class TranscriptFold:
    """Gathers the entries of each episode until its result, and gives its transcript then: one pass, few in memory."""

    def __init__(self) -> None:
        self._open: dict[str, list[StreamEntry]] = {}
        self._finished: set[str] = set()

    def add(self, entry: StreamEntry) -> Transcript | None:
        """The transcript of the episode that this entry finishes, else None."""
        episode_id = entry.subject.rpartition(".")[2]
        if episode_id in self._finished:
            return None
        self._open.setdefault(episode_id, []).append(entry)
        is_event = entry.subject.split(".", 3)[2] == "episode"
        if not is_event or not isinstance(read_stored(entry), EpisodeFinished):
            return None
        self._finished.add(episode_id)
        return read_transcript(self._open.pop(episode_id))

    def unfinished(self) -> Iterator[Transcript]:
        """Those without a result, at the end of the log."""
        for entries in self._open.values():
            yield read_transcript(entries)


class StepFold:
    """Gathers training steps; those of lineages that were cut off do not count."""

    def __init__(self) -> None:
        self._lineages: list[LineageStarted] = []
        self._steps: list[StepRow] = []

    def add(self, entry: StreamEntry) -> None:
        match read_stored(entry):
            case LineageStarted() as started:
                self._lineages.append(started)
            case StepTrained() as step:
                self._steps.append(_build_step_row(step, entry.time_ns))

    def rows(self) -> list[StepRow]:
        """The steps so far."""
        surviving = compute_surviving_steps(self._lineages)
        return [row for row in self._steps if is_surviving(surviving, row.lineage, row.step)]


def list_transcript_subjects(subjects: Subjects) -> list[str]:
    """Wildcards for every entry that a transcript is made of."""
    return [subjects.tasks(), subjects.observation("*", "*", "*"), subjects.action("*", "*"), subjects.episodes]


def build_token_row(transcript: Transcript, trained: TrainedTokens | None = None) -> TokenRow:
    """The tokens of the turns that count, with what the trainer noted of them."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for action in (turn.action for turn in transcript.turns if turn.action is not None):
        shown, sampled = count_tokens(action.prompt_delta), count_tokens(action.sampled)
        ids += [*unpack_ids(take_tokens(action.prompt_delta, shown)), *unpack_ids(take_tokens(action.sampled, sampled))]
        mask += [False] * shown + [True] * sampled
        known = unpack_logprobs(take_tokens(action.logprobs, sampled))
        logprobs += [*[0.0] * shown, *known, *[math.nan] * (sampled - len(known))]  # any message may have too few
        versions += [NO_VERSION] * (shown + sampled)
        for span in action.versions:
            start = min(max(span.start, 0), sampled)  # of any message
            stop = max(min(span.stop, sampled), start)
            begin = len(versions) - sampled
            versions[begin + start : begin + stop] = [span.version] * (stop - start)
    request, result = transcript.request, transcript.result
    columns = spread_over(trained, len(ids)) if trained is not None else TrainerColumns([], [], [])
    return TokenRow(
        episode_id=result.episode_id if result else request.episode_id if request else "",
        task_key=result.task_key if result else request.task.key if request else "",
        outcome=result.outcome if result else "",
        reward=result.reward if result else None,
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        trainer_logprobs=tuple(columns.logprobs),
        gradients=tuple(columns.gradients),
        clipped=tuple(columns.clipped),
        trained_version=trained.version if trained is not None else NO_VERSION,
    )


def _build_step_row(step: StepTrained, time_ns: int) -> StepRow:
    return StepRow(
        step=step.step,
        version=step.version,
        lineage=step.lineage,
        time_ns=time_ns,
        episodes=len(step.episodes),
        excluded=len(step.excluded),
        metrics=step.metrics,
    )
