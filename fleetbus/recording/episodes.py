"""Episodes as people look for them: one row per episode, and what was said in one of them. A fold of log entries; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.failure_kinds import FailureKinds
from fleetbus.core.episode.history import Turn, fold_history
from fleetbus.core.episode.labels import Comment, EpisodeLabels, Label
from fleetbus.core.episode.turn_contexts import TurnContext, describe_turns
from fleetbus.errors import UserError
from fleetbus.log.episodes import decode_entries
from fleetbus.log.labels import fold_labels
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    EpisodeLabeled,
    EpisodeRequested,
    Message,
    Observation,
    Split,
    Subjects,
    ToolSpec,
)

MAX_STAGES, MAX_SECONDS = 32, 1e9
"""Of one result: so many stages are kept, and only times that are some; 1e9 s are 30 years."""


def keep_timings(timings: dict[str, float]) -> dict[str, float]:
    """The ``timings`` of a result that can be added up: whoever wrote it may have written anything."""
    seconds = timings.values()
    if len(timings) <= MAX_STAGES and min(seconds, default=0.0) >= 0 and sum(seconds) < MAX_SECONDS:
        return timings
    return {stage: spent for stage, spent in islice(timings.items(), MAX_STAGES) if 0 <= spent < MAX_SECONDS}


class EpisodeRow(msgspec.Struct, kw_only=True):
    """One episode. ``outcome`` is empty while it has none; ``seconds`` runs from its request to its result, in log time.
    ``labels`` and ``comments`` are what people said of it or of one of its turns: names, and texts."""

    episode_id: str
    group_id: str = ""
    split: Split = "train"
    task_key: str = ""
    env: str = ""
    policy: str = ""
    outcome: str = ""
    error_class: str = ""
    error: str = ""
    reward: float | None = None
    turns: int = 0
    tokens: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    attempts: int = 0
    policy_versions: tuple[int, ...] = ()
    worker: str = ""
    sequence: int = 0
    requested_ns: int = 0
    seconds: float | None = None
    timings: dict[str, float] = msgspec.field(default_factory=dict)
    error_location: str = ""
    pool: str = ""
    labels: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()


class EpisodeIndex:
    """Folds ``task.>``, ``episode.>`` and ``label.>`` into rows, in order of their first entry."""

    def __init__(self) -> None:
        self.rows: dict[str, EpisodeRow] = {}
        self._labels: dict[str, EpisodeLabels] = {}
        self.failures = FailureKinds()

    def add(self, entry: StreamEntry) -> None:
        """Note an entry; those of other subjects and those that are no messages say nothing."""
        if entry.subject.split(".", 3)[2] in ("task", "episode", "label") and (message := read_stored(entry)) is not None:
            self.apply(entry, message)

    def apply(self, entry: StreamEntry, message: Message) -> None:
        """As `add`, of an entry that was decoded; a message on a subject of another kind says nothing."""
        _, _, kind, *names = entry.subject.split(".")
        name = names[-1]
        match message:
            case EpisodeRequested() if kind == "task":
                self._add_request(self._get_row(name, entry), entry, message, names[0])
            case AttemptStarted() if kind == "episode":
                row = self._get_row(name, entry)
                row.attempts, row.worker = message.attempt, message.worker
            case EpisodeFinished() if kind == "episode":
                self._add_result(self._get_row(name, entry), entry, message)
            case EpisodeLabeled() if kind == "label" and name in self.rows:
                labels = self._labels.setdefault(name, EpisodeLabels())
                labels.apply(message, entry.sequence, entry.time_ns)
                row = self.rows[name]
                row.labels, row.comments = labels.names, tuple(comment.text for comment in labels.comments)

    def forget(self, episode_id: str) -> None:
        """Drop an episode."""
        self.rows.pop(episode_id, None)
        self._labels.pop(episode_id, None)

    def _add_request(self, row: EpisodeRow, entry: StreamEntry, request: EpisodeRequested, pool: str) -> None:
        row.pool = pool
        row.group_id, row.split, row.policy = request.group_id, request.split, request.policy
        row.task_key, row.env = request.task.key, request.task.env
        row.requested_ns = entry.time_ns

    def _add_result(self, row: EpisodeRow, entry: StreamEntry, result: EpisodeFinished) -> None:
        if row.outcome:
            return
        for field in ("group_id", "split", "task_key", "env", "outcome", "error_class", "error", "reward", "turns", "tokens"):
            setattr(row, field, getattr(result, field))
        for field in ("tool_calls", "tool_errors", "attempts", "policy_versions", "worker", "error_location"):
            setattr(row, field, getattr(result, field))
        row.timings = keep_timings(result.timings)
        self.failures.apply(result)
        if row.requested_ns:
            row.seconds = (entry.time_ns - row.requested_ns) / 1e9

    def _get_row(self, episode_id: str, entry: StreamEntry) -> EpisodeRow:
        return self.rows.setdefault(episode_id, EpisodeRow(episode_id=episode_id, sequence=entry.sequence))


class TranscriptTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: what the policy was shown, and the Action that answered it (None while there is none); ``time_ns`` is the log's
    time of the Action. ``seat`` is who acts, if the episode has several."""

    turn: int
    attempt: int
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    action: Action | None = None
    sequence: int = 0
    time_ns: int = 0
    seat: str = ""


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as it counts: the turns of its final history, and after them what is still unanswered. ``requested_ns`` and
    ``finished_ns`` are the log's times of request and result, 0 where there is none. ``labels`` and ``comments`` are what
    people said of it, where it was read alone: of many transcripts in one pass each ends with its result."""

    request: EpisodeRequested | None
    result: EpisodeFinished | None
    claims: tuple[AttemptStarted, ...]
    turns: tuple[TranscriptTurn, ...]
    requested_ns: int = 0
    finished_ns: int = 0
    labels: tuple[Label, ...] = ()
    comments: tuple[Comment, ...] = ()

    @property
    def contexts(self) -> list[TurnContext]:
        """The context of each turn that was answered."""
        return describe_turns(turn.action for turn in self.turns if turn.action is not None and turn.action.sampled)


def build_episode_subjects(subjects: Subjects, episode_id: str) -> list[str]:
    """Wildcards that match every entry of one episode."""
    return [
        subjects.task("*", episode_id),
        subjects.observation("*", "*", episode_id),
        subjects.action("*", episode_id),
        subjects.episode(episode_id),
        subjects.label(episode_id),
    ]


def read_transcript(entries: Iterable[StreamEntry]) -> Transcript:
    """The transcript of the one episode that ``entries`` are of, in log order; others must not be among them."""
    by_kind: dict[str, list[StreamEntry]] = {}
    for entry in entries:
        by_kind.setdefault(entry.subject.split(".", 3)[2], []).append(entry)
    events = [(entry.time_ns, read_stored(entry)) for entry in by_kind.get("episode", [])]
    claims = tuple(event for _, event in events if isinstance(event, AttemptStarted))
    requests = [(entry.time_ns, read_stored(entry)) for entry in by_kind.get("task", [])]
    times = {entry.sequence: entry.time_ns for entry in by_kind.get("act", [])}
    observations = [each for _, each in decode_entries(Observation, by_kind.get("obs", []))]
    turns = [
        Turn(sequence=entry.sequence, lane=entry.subject.split(".")[3], action=action)
        for entry, action in decode_entries(Action, by_kind.get("act", []))
    ]
    labels = fold_labels(by_kind.get("label", []))
    requested_ns, request = next(((at, each) for at, each in requests if isinstance(each, EpisodeRequested)), (0, None))
    finished_ns, result = next(((at, event) for at, event in events if isinstance(event, EpisodeFinished)), (0, None))
    return Transcript(
        request=request,
        result=result,
        claims=claims,
        turns=tuple(_build_turns(fold_history(claims, turns), observations, claims, times)),
        requested_ns=requested_ns,
        finished_ns=finished_ns,
        labels=labels.labels,
        comments=labels.comments,
    )


def build_example(transcript: Transcript) -> list[ChatMessage]:
    """The conversation of an episode without its instructions, as ``environment.examples`` takes it. Raises `UserError` if
    it has no answer, images, or more than one segment."""
    answered = [turn for turn in transcript.turns if turn.action is not None]
    if not answered:
        raise UserError("the episode has no answer yet")
    if len({turn.action.segment for turn in answered if turn.action is not None}) > 1:
        raise UserError("the episode's context was changed on the way: an example is one conversation")
    messages = [message for turn in answered for message in (*turn.messages, _build_answer(turn))]
    if any(message.images for message in messages):
        raise UserError("the episode shows images: an example is text")
    return [message for message in messages if message.role not in ("system", "developer")]


def _build_answer(turn: TranscriptTurn) -> ChatMessage:
    assert turn.action is not None
    return ChatMessage(role="assistant", content=turn.action.text)


def _build_turns(
    history: tuple[Turn, ...],
    observations: list[Observation],
    claims: tuple[AttemptStarted, ...],
    times: Mapping[int, int],
) -> Iterable[TranscriptTurn]:
    seen = {(each.attempt, each.turn): each for each in observations}
    shown: dict[int, tuple[ChatMessage, ...]] = {each.turn: each.messages for each in observations}
    for turn in history:
        asked = seen.get((turn.action.attempt, turn.action.turn))
        yield TranscriptTurn(
            turn=turn.action.turn,
            attempt=turn.action.attempt,
            messages=asked.messages if asked else shown.get(turn.action.turn, ()),
            tools=asked.tools if asked else (),
            action=turn.action,
            sequence=turn.sequence,
            time_ns=times.get(turn.sequence, 0),
            seat=asked.seat if asked else "",
        )
    newest = claims[-1].attempt if claims else 1
    waiting = seen.get((newest, len(history)))
    if waiting is not None:
        yield TranscriptTurn(
            turn=waiting.turn, attempt=newest, messages=waiting.messages, tools=waiting.tools, seat=waiting.seat
        )
