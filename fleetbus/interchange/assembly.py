"""Imported episodes as the entries of a log: request, claim, a pair of Observation and Action per turn, and the result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import cast, get_args

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.history import Turn, list_versions, loss_mask
from fleetbus.core.episode.result_checks import find_actions_problem
from fleetbus.core.episode.segments import SegmentError, describe_segments, fold_segments
from fleetbus.errors import UserError
from fleetbus.interchange.episode_facts import read_number, read_text
from fleetbus.interchange.imported import ImportedEpisode, ImportedTurn, describe_missing
from fleetbus_schemas import (
    GRADED,
    NEW_ROOT,
    Action,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    MalformedMessage,
    Message,
    Observation,
    Outcome,
    SegmentOrigin,
    Split,
    Subjects,
    Task,
    encode,
)
from fleetbus_schemas.names import find_wrong_name, is_name
from fleetbus_schemas.tokens import TOKEN_BYTES, count_tokens, pack_ids, pack_logprobs, pack_mask

LANE, POOL, WORKER = "e0", "default", "import"
NO_TOKEN = bytes(TOKEN_BYTES)
"""In the place of ids that a file does not have; ids that were taken out with a secret are the same, and never trained."""


class Assembler:
    """Gives each episode its place in the log of ``run``: sequences and times that only grow, a name of its own."""

    def __init__(self, run: str, split: Split) -> None:
        self._subjects = Subjects(run)
        self._split = split
        self._names: dict[str, int] = {}
        self.sequence = 0
        self._time_ns = 1

    def assemble(self, episode: ImportedEpisode) -> list[StreamEntry]:
        """The entries of an episode. Raises `UserError` for numbers that do not fit each other, and for what is too large."""
        name = self._choose_name(episode)
        try:
            return list(self._build(episode, name))
        except MalformedMessage as error:
            raise UserError(f"{episode.place}: it does not fit the messages of a log: {error.reason}") from error
        except (SegmentError, ValueError, OverflowError) as error:
            raise UserError(f"{episode.place}: its numbers do not fit each other: {error}") from error

    def _build(self, episode: ImportedEpisode, name: str) -> Iterator[StreamEntry]:
        request = build_request(episode, name, self._split)
        missing = describe_missing(episode.turns)
        turns = [without_tokens(turn) for turn in episode.turns] if "without token ids" in missing else episode.turns
        yield self._add(self._subjects.task(POOL, name), request, episode.time_ns)
        request_sequence = self.sequence
        claim = AttemptStarted(
            episode_id=name, attempt=1, worker=WORKER, nonce=name, lane=LANE, request_sequence=request_sequence
        )
        yield self._add(self._subjects.episode(name), claim, episode.time_ns)
        history: list[Turn] = []
        for number, turn in enumerate(turns):
            observation = build_observation(turn, number, request, request_sequence)
            yield self._add(self._subjects.observation(observation.policy, "any", name), observation, turn.time_ns)
            action = build_action(turn, number, name, self.sequence)
            yield self._add(self._subjects.action(LANE, name), action, turn.time_ns)
            history.append(Turn(sequence=self.sequence, lane=LANE, action=action))
        result = build_result(episode, request, history, request_sequence, missing)
        if history and (problem := find_actions_problem(result, [turn.action for turn in history])):
            raise UserError(f"{episode.place}: {problem}")
        if episode.finished:
            yield self._add(self._subjects.episode(name), result, 0)

    def _add(self, subject: str, message: Message, time_ns: int) -> StreamEntry:
        if field := find_wrong_name(message):
            raise MalformedMessage(subject, f"its {field} is no name")  # nobody could read it
        self.sequence += 1
        self._time_ns = max(self._time_ns, time_ns)
        return StreamEntry(
            subject=subject, payload=encode(message, subject=subject), sequence=self.sequence, time_ns=self._time_ns
        )

    def _choose_name(self, episode: ImportedEpisode) -> str:
        """The name that it asks for as one of a subject, with a number behind it if an episode before has that."""
        name = base = make_name(episode.name)[:100]
        while name in self._names:
            self._names[base] += 1
            name = f"{base}-{self._names[base]}"
        self._names[name] = 1
        return name


def make_name(text: str) -> str:
    """``text`` as a token of a subject: what cannot stand there is replaced, and then a hash says which text it was."""
    if is_name(text):
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', text)[:80].strip('-') or 'imported'}-{digest}"


def without_tokens(turn: ImportedTurn) -> ImportedTurn:
    """The turn as text: its segment keeps nothing of another, for nothing is known of the tokens."""
    origin = turn.origin
    alone = SegmentOrigin(parent=NEW_ROOT, kept=0, reason=origin.reason) if origin is not None else None
    return msgspec.structs.replace(turn, tokens=None, origin=alone, images=(), versions=())


def build_request(episode: ImportedEpisode, name: str, split: Split) -> EpisodeRequested:
    """The request that was recorded, or one of what is known."""
    if episode.request is not None:
        policy = make_name(episode.request.policy)
        seats = tuple(msgspec.structs.replace(seat, policy=make_name(seat.policy)) for seat in episode.request.seats)
        return msgspec.structs.replace(episode.request, episode_id=name, policy=policy, seats=seats)
    facts = episode.facts
    digest = hashlib.blake2b(episode.prompt.encode("utf-8", "replace"), digest_size=6).hexdigest()
    key = read_text(facts.get("task")) or f"task-{digest}"
    task = Task(key=key, env=read_text(facts.get("env")), prompt=episode.prompt)
    known: Split = "eval" if facts.get("split") == "eval" else "train" if facts.get("split") == "train" else split
    return EpisodeRequested(
        episode_id=name,
        group_id=read_text(facts.get("group_id")) or key,
        sample_index=0,
        split=known,
        task=task,
        policy=make_name(read_text(facts.get("policy")) or "imported"),
        deadline_ns=episode.time_ns + 1,
    )


def build_observation(turn: ImportedTurn, number: int, request: EpisodeRequested, request_sequence: int) -> Observation:
    return Observation(
        episode_id=request.episode_id,
        attempt=1,
        turn=number,
        policy=request.find_policy(turn.seat),
        messages=tuple(turn.messages),
        tools=turn.tools,
        sampling=request.sampling,
        tokens_left=request.max_tokens,
        environment_lane=LANE,
        request_sequence=request_sequence,
        deadline_ns=request.deadline_ns,
        segment=turn.segment,
        origin=turn.origin,
        segments=turn.segment + 1,
        seat=turn.seat,
    )


def build_action(turn: ImportedTurn, number: int, name: str, observation_sequence: int) -> Action:
    tokens = turn.tokens
    prompt, sampled, logprobs = NO_TOKEN, NO_TOKEN, pack_logprobs([0.0])
    if tokens is not None:
        prompt, sampled = pack_ids(tokens.prompt_delta), pack_ids(tokens.sampled)
        logprobs = pack_logprobs(tokens.logprobs if tokens.logprobs is not None else [0.0] * len(tokens.sampled))
    return Action(
        episode_id=name,
        attempt=1,
        turn=number,
        text=turn.text,
        tool_calls=turn.tool_calls,
        prompt_delta=prompt,
        sampled=sampled,
        logprobs=logprobs,
        finish_reason=turn.finish_reason,
        versions=turn.versions,
        worker=turn.worker or WORKER,
        observation_sequence=observation_sequence,
        images=turn.images,
        segment=turn.segment,
        origin=turn.origin,
        tool_call_errors=turn.tool_call_errors,
    )


def build_result(
    episode: ImportedEpisode, request: EpisodeRequested, history: list[Turn], request_sequence: int, missing: str
) -> EpisodeFinished:
    """The result that was recorded, or one of what is known, with the Actions of this log."""
    actions = [turn.action for turn in history]
    tokens = sum(count_tokens(action.prompt_delta) + count_tokens(action.sampled) for action in actions)
    result = episode.result if episode.result is not None else _build_unknown_result(episode, request)
    untrained = {each.turn for each in result.untrained}
    return msgspec.structs.replace(
        result,
        episode_id=request.episode_id,
        attempt=1,
        request_sequence=request_sequence,
        policy_versions=result.policy_versions or list_versions(history),
        turns=len(history),
        actions=tuple(turn.reference for turn in history),
        tokens=tokens,
        loss_mask=pack_mask(loss_mask(history, untrained)),
        segments=describe_segments(fold_segments(actions)),
        last_observation=result.last_observation if episode.result is not None else episode.last_observation,
        note="; ".join(part for part in (result.note, missing) if part),
    )


def _build_unknown_result(episode: ImportedEpisode, request: EpisodeRequested) -> EpisodeFinished:
    """Without a reward there is no verdict, which another verifier may give."""
    facts = episode.facts
    reward, outcome = read_number(facts.get("reward")), facts.get("outcome")
    if outcome not in get_args(Outcome):
        outcome = "completed" if reward is not None else "verifier_unknown"
    if outcome in GRADED and reward is None:
        outcome = "verifier_unknown"
    return EpisodeFinished(
        episode_id=request.episode_id,
        group_id=request.group_id,
        attempt=1,
        outcome=cast("Outcome", outcome),
        worker=WORKER,
        split=request.split,
        task_key=request.task.key,
        env=request.task.env,
        reward=reward if outcome in GRADED else None,
        error_class=read_text(facts.get("error_class")),
        error=read_text(facts.get("error")),
        tool_calls=sum(len(turn.tool_calls) for turn in episode.turns),
    )
