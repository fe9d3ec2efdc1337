"""A log as spans: entries in, those spans out that each of them ended. Pure; memory grows with open episodes and sessions only.

An episode's spans come from `fleetbus_workers.observe.tracing.episode`, those of a step-wise session from
`fleetbus_workers.observe.tracing.session`. The
learner's steps are traces of their own, linked with the episodes that they consumed; each of those episodes gets a `batch` span
(from its result until its batch was complete) and a `train` span.
"""

from collections.abc import Collection, Iterable, Iterator

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.trace_ids import compute_session_trace_id, is_sampled, span_id, trace_id
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus_schemas import (
    Action,
    AttemptReleased,
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    Message,
    Observation,
    SessionClaimed,
    SessionEnded,
    SessionRecorded,
    StepTrained,
    TrainingFinished,
)
from fleetbus_schemas.training import Exclusion
from fleetbus_workers.observe.tracing.episode import EpisodeTrace
from fleetbus_workers.observe.tracing.session import SessionTrace
from fleetbus_workers.observe.tracing.span import Span, Value, to_nanoseconds

KEPT_RESULTS = 200_000
"""Episodes that ended and that no step has taken or excluded yet; the oldest are forgotten, and get no learner's spans."""

STAGES = ("wait", "read", "train")
"""The stages of a step, in order, as ``seconds_<stage>`` of its metrics; the entry is stored after the last."""

TRAINING: tuple[type[Message], ...] = (StepTrained, TrainingFinished, CheckpointStored, EvaluationFinished)
JOURNAL: tuple[type[Message], ...] = (SessionClaimed, SessionRecorded, SessionEnded)


class LogTraces:
    """``episodes`` and ``sessions`` are the only ones wanted, if any is given (then steps have no traces); ``ratio`` is the
    share of traces kept. Spans have what was said only with ``content``."""

    def __init__(
        self,
        run: str,
        *,
        episodes: Collection[str] = (),
        sessions: Collection[str] = (),
        ratio: float = 1.0,
        content: bool = False,
    ) -> None:
        self._run = run
        self._only = frozenset((*(("episode", name) for name in episodes), *(("session", name) for name in sessions)))
        self._ratio = ratio
        self._content = content
        self._open: dict[str, EpisodeTrace] = {}
        self._ended: dict[str, EpisodeTrace] = {}
        self._learners: dict[str, str] = {}
        self._sessions: dict[str, SessionTrace] = {}
        self.episodes = 0
        """Episodes whose trace is whole, but for training."""
        self.sessions = 0
        """Sessions that ended."""

    @property
    def open(self) -> int:
        """Episodes without a result."""
        return len(self._open)

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    def add(self, entry: StreamEntry) -> Iterator[Span]:
        """Take in an entry of the log."""
        kind, episode = entry.subject.split(".", 3)[2], entry.subject.rpartition(".")[2]
        if kind == "train":
            yield from self._apply_training_entry(entry)
        elif kind == "task":
            self._apply_request(entry, episode)
        elif kind == "session":
            yield from self._apply_session_entry(entry, episode)
        elif trace := self._open.get(episode):
            yield from self._apply_episode_entry(entry, kind, episode, trace)

    def _apply_request(self, entry: StreamEntry, episode: str) -> None:
        if episode in self._open or episode in self._ended or not self._is_wanted("episode", episode):
            return
        for _, request in decode_entries(EpisodeRequested, [entry]):
            trace = EpisodeTrace(self._run, entry, request, content=self._content)
            if is_sampled(trace.trace_id, self._ratio):
                self._open[episode] = trace

    def _apply_episode_entry(self, entry: StreamEntry, kind: str, episode: str, trace: EpisodeTrace) -> Iterator[Span]:
        if kind == "obs":
            for _, observation in decode_entries(Observation, [entry]):
                yield from trace.apply_observation(entry, observation)
        elif kind == "act":
            for _, action in decode_entries(Action, [entry]):
                yield from trace.apply_action(entry, action)
        elif kind == "episode":
            match decode_episode_entry(entry):
                case AttemptStarted() as claim:
                    yield from trace.apply_claim(entry, claim)
                case AttemptReleased() as release:
                    yield from trace.apply_release(entry, release)
                case EpisodeFinished() as result:
                    yield from trace.apply_result(entry, result)
                    self._close(episode, trace)

    def _close(self, episode: str, trace: EpisodeTrace) -> None:
        del self._open[episode]
        self.episodes += 1
        if trace.is_training:
            self._ended[episode] = trace
            if len(self._ended) > KEPT_RESULTS:
                del self._ended[next(iter(self._ended))]

    def _is_wanted(self, kind: str, name: str) -> bool:
        return not self._only or (kind, name) in self._only

    # Step-wise sessions

    def _apply_session_entry(self, entry: StreamEntry, session: str) -> Iterator[Span]:
        trace = self._sessions.get(session)
        for _, message in decode_entries(Message, [entry], beside=JOURNAL):
            match message:
                case SessionClaimed() if trace is not None:
                    yield from trace.apply_claim(entry, message)
                case SessionClaimed(attempt=1) if self._is_wanted("session", session):
                    if is_sampled(compute_session_trace_id(self._run, session), self._ratio):
                        self._sessions[session] = SessionTrace(self._run, entry, message, content=self._content)
                case SessionRecorded() if trace is not None:
                    yield from trace.apply_record(entry, message)
                case SessionEnded() if trace is not None:
                    yield from trace.apply_end(entry, message)
        if trace is not None and trace.is_over:
            del self._sessions[session]
            self.sessions += 1

    # Training

    def _apply_training_entry(self, entry: StreamEntry) -> Iterator[Span]:
        for _, begun in decode_entries(LineageStarted, [entry], beside=TRAINING):
            self._learners[begun.lineage] = begun.worker
        for _, step in decode_entries(StepTrained, [entry], beside=(LineageStarted, *TRAINING)):
            yield from self._apply_step(entry, step)
        for _, finish in decode_entries(TrainingFinished, [entry], beside=(LineageStarted, *TRAINING)):
            yield from self._build_exclusion_spans(entry, finish.lineage, finish.step, finish.excluded)

    def _apply_step(self, entry: StreamEntry, step: StepTrained) -> Iterator[Span]:
        about = _build_attributes(step.lineage, step.step, entry) | {"fleetbus.version": step.version}
        worker = self._learners.get(step.lineage, "")
        traces = [(episode, self._ended.pop(episode)) for episode in step.episodes if episode in self._ended]
        stages = _compute_stage_times(step, entry.time_ns)
        read_ns, train_ns = stages["read"][0], stages["train"][0]
        whole = self._compute_step_trace(step.lineage, step.step, entry)
        path = f"{step.lineage}/{step.step}"
        for _, trace in traces:
            yield trace.build_settlement_span(
                entry.sequence, "batch", f"batch/{path}", trace.ended_ns, read_ns, worker=worker, about=about, link=whole
            )
            yield trace.build_settlement_span(
                entry.sequence, "train", f"train/{path}", train_ns, entry.time_ns, worker=worker, about=about, link=whole
            )
        yield from self._build_exclusion_spans(entry, step.lineage, step.step, step.excluded)
        if not self._only:
            links = tuple((trace.trace_id, trace.root_id) for _, trace in traces)
            about |= {"fleetbus.log.episodes": len(step.episodes), "fleetbus.excluded": len(step.excluded)}
            yield from self._build_step_spans(entry, whole, stages, worker, about, links)

    def _build_step_spans(
        self,
        entry: StreamEntry,
        whole: tuple[int, int],
        stages: dict[str, tuple[int, int]],
        worker: str,
        about: dict[str, Value],
        links: tuple[tuple[int, int], ...],
    ) -> Iterator[Span]:
        trace, root = whole
        attributes: dict[str, Value] = {"fleetbus.run": self._run, "fleetbus.worker": worker, **about}
        for name, (start_ns, end_ns) in [("training step", (stages["wait"][0], entry.time_ns)), *stages.items()]:
            is_root = name == "training step"
            yield Span(
                trace_id=trace,
                span_id=root if is_root else span_id(trace, name),
                parent_id=0 if is_root else root,
                name=name,
                start_ns=start_ns,
                end_ns=end_ns,
                sequence=entry.sequence,
                role="learner",
                worker=worker,
                attributes=attributes,
                links=links if is_root else (),
            )

    def _build_exclusion_spans(
        self, entry: StreamEntry, lineage: str, step: int, excluded: Iterable[Exclusion]
    ) -> Iterator[Span]:
        about, whole = _build_attributes(lineage, step, entry), self._compute_step_trace(lineage, step, entry)
        worker = self._learners.get(lineage, "")
        for each in excluded:
            trace = self._ended.pop(each.episode_id, None)
            if trace is not None:
                yield trace.build_settlement_span(
                    entry.sequence,
                    "batch",
                    f"batch/{lineage}/{step}",
                    trace.ended_ns,
                    entry.time_ns,
                    worker=worker,
                    about=about | {"fleetbus.excluded.reason": each.reason},
                    link=whole,
                )

    def _compute_step_trace(self, lineage: str, step: int, entry: StreamEntry) -> tuple[int, int]:
        trace = trace_id(self._run, f"step/{lineage}/{step}", entry.time_ns)
        return trace, span_id(trace)


def _build_attributes(lineage: str, step: int, entry: StreamEntry) -> dict[str, Value]:
    return {"fleetbus.lineage": lineage, "fleetbus.step": step, "fleetbus.train.sequence": entry.sequence}


def _compute_stage_times(step: StepTrained, end_ns: int) -> dict[str, tuple[int, int]]:
    """Begin and end of each stage, counted back from when the step was stored."""
    found: dict[str, tuple[int, int]] = {}
    for stage in reversed(STAGES):
        begin = end_ns - to_nanoseconds(step.metrics.get(f"seconds_{stage}", 0.0))
        found[stage] = (begin, end_ns)
        end_ns = begin
    return {stage: found[stage] for stage in STAGES}
