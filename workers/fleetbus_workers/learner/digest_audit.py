"""The deep audit: from the log alone, that what was trained is what was sampled.

The log is read twice: first for the steps that count, then for what they trained, episode by episode, so that memory holds the
Actions of open episodes and of each finished one a digest. It only reads; the books are kept by `fleetbus.core.audit.books`.
Code that a log names is never imported: who audits names the functions that it may call.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from fleetbus.bus.base import StreamEntry
from fleetbus.config.settings import AlgorithmSettings, EpisodeSettings, LearnerSettings
from fleetbus.config.table import Settings
from fleetbus.core.audit.findings import Finding, Findings
from fleetbus.core.audit.training import TrainingAudit
from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.segments import fold_segments, hash_segments
from fleetbus.core.training.groups import Group
from fleetbus.core.training.own_seats import select_own_seats
from fleetbus.errors import UserError
from fleetbus.log.archive_retention import Removed
from fleetbus.log.stored_entries import decode_stored
from fleetbus_schemas import Action, EpisodeFinished, EpisodeRequested, LineageStarted, MalformedMessage, Message, StepTrained
from fleetbus_schemas.message import decode
from fleetbus_workers.learner.batches import (
    CreditPlan,
    build_sequence,
    compute_episode_advantages,
    count_trained,
    spread_advantages,
)
from fleetbus_workers.learner.leaves import Leaf, is_whole, list_leaves, split_sequence
from fleetbus_workers.learner.training_digest import add_advantages, digest_sampled, join_leaves

Scan = Callable[[], AsyncIterator[StreamEntry]]
"""A fresh reading of the log, entry by entry from its beginning."""

S = TypeVar("S", bound=Settings)

NOTHING = Removed()


class DigestReport(msgspec.Struct, frozen=True, kw_only=True):
    """``proven`` episodes of steps that count were trained as the log says; ``findings`` are about the others, but for the
    ``unread`` ones: of their steps not all can be read any more."""

    proven: int
    unread: int = 0
    findings: tuple[Finding, ...]


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """The facts kept of a finished episode: its result, the digest of all but advantages of each leaf, its loss mask as packed
    bits, how many tokens each turn sampled, and the leaves if there is more than one segment."""

    result: EpisodeFinished
    digests: tuple[bytes, ...]
    loss_mask: bytes
    counts: tuple[int, ...]
    leaves: tuple[Leaf, ...]


async def audit_digests(
    scan: Scan, *, last_sequence: int, trusted: Collection[str] = (), removed: Removed = NOTHING
) -> DigestReport:
    """Prove every step that counts among the entries up to ``last_sequence``. Raises `UserError` for a lineage that was trained
    with an advantage function of its user's that is not among the ``trusted`` ones (``module:function``). What was
    ``removed`` for good cannot be proven."""
    audit = DigestAudit(trusted, is_whole=removed.below == 1)
    for each in removed.lineages:
        audit.begin_with(each.sequence, each.subject, decode(LineageStarted, each.payload, subject=each.subject))
    async for entry in scan():
        if entry.sequence <= last_sequence and _get_kind(entry) == "train":
            audit.enter_training(entry)
    audit.count_steps()
    async for entry in scan():
        if entry.sequence <= last_sequence:
            audit.enter(entry)
    return audit.report()


class DigestAudit:
    """Call `enter_training` with the learners' entries, `count_steps`, and then `enter` with every entry."""

    def __init__(self, trusted: Collection[str] = (), *, is_whole: bool = True) -> None:
        self._trusted = trusted
        self._is_whole = is_whole
        self._unread = 0
        self._findings = Findings()
        self._training: dict[str, TrainingAudit] = {}
        self._plans: dict[tuple[str, str], CreditPlan] = {}
        self._steps: dict[int, CreditPlan] = {}
        self._plans_of: dict[str, dict[str, CreditPlan]] = {}
        """By episode and policy: each that trains it has rules of its own."""
        self._asked_for: dict[str, str] = {}
        """By open episode the policy that it was requested for."""
        self._actions: dict[str, dict[int, Action]] = {}
        self._sampled: dict[str, dict[str, Sampled]] = {}
        """By policy and episode."""
        self._proven = 0

    def begin_with(self, sequence: int, subject: str, started: LineageStarted) -> None:
        """A lineage that began among what was removed."""
        self._training.setdefault(subject, TrainingAudit(begins_anywhere=True)).begin_with(sequence, started)
        self._plans[subject, started.lineage] = _build_plan(started)

    def enter_training(self, entry: StreamEntry) -> None:
        message, ignored = _decode(entry), Findings()  # the books have reported all that is to be reported of steps themselves
        training = self._training.setdefault(entry.subject, TrainingAudit(begins_anywhere=not self._is_whole))
        if isinstance(message, LineageStarted):
            training.on_lineage(entry.sequence, message, ignored)
            self._plans[entry.subject, message.lineage] = _build_plan(message)
        elif isinstance(message, StepTrained):
            training.on_step(entry.sequence, message, ignored)

    def count_steps(self) -> None:
        """From now on it is known which steps count, and by which rules each episode was trained."""
        for subject, training in self._training.items():
            for step in training.list_settlements(Findings()):
                plan = self._plans.get((subject, step.lineage))
                if plan is None and not self._is_whole:  # its lineage began among what was removed
                    self._unread += len(step.episodes)
                    continue
                assert plan is not None
                if plan.advantage and plan.advantage not in self._trusted:
                    raise UserError(
                        f"lineage {step.lineage} was trained with the function {plan.advantage!r}, which is code: name it with "
                        "--advantage to have it imported and called, or audit without --deep"
                    )
                self._steps[step.sequence] = plan
                for episode in step.episodes:
                    self._plans_of.setdefault(episode, {})[subject.rpartition(".")[2]] = plan

    def enter(self, entry: StreamEntry) -> None:
        kind = _get_kind(entry)
        if kind == "train" and entry.sequence in self._steps:
            step = _decode(entry)
            assert isinstance(step, StepTrained)
            self._check_step(entry.sequence, step, self._sampled.get(entry.subject.rpartition(".")[2], {}))
        elif kind in ("task", "act", "episode") and entry.subject.rpartition(".")[2] in self._plans_of:
            message = _decode(entry)
            if isinstance(message, Action):
                self._actions.setdefault(message.episode_id, {})[entry.sequence] = message
            elif isinstance(message, EpisodeRequested):
                self._asked_for.setdefault(message.episode_id, message.policy)
            elif isinstance(message, EpisodeFinished):
                self._summarize(message)

    def report(self) -> DigestReport:
        return DigestReport(proven=self._proven, unread=self._unread, findings=self._findings.list_found())

    def _summarize(self, result: EpisodeFinished) -> None:
        """A history that cannot be trained at all is left out, and all that was trained of it is wrong then."""
        actions = self._actions.pop(result.episode_id, {})
        if any(reference.sequence not in actions for reference in result.actions):
            return
        named = [actions[reference.sequence] for reference in result.actions]
        asked = self._asked_for.pop(result.episode_id, "")
        policies = {seat.policy for seat in result.seats}
        for policy, plan in self._plans_of.pop(result.episode_id).items():
            is_joined = policy != asked if asked else policy in policies
            own = select_own_seats(result, policy if is_joined else "")
            if (sampled := _summarize(own, named, plan)) is None:
                continue
            if len(result.segments) > 1 and not _hashes_follow(named):
                self._findings.add("history_hash_wrong", result.episode_id, result.actions[0].sequence)
            self._sampled.setdefault(policy, {})[result.episode_id] = sampled

    def _check_step(self, position: int, step: StepTrained, known: dict[str, Sampled]) -> None:
        sampled = {episode: known.pop(episode) for episode in step.episodes if episode in known}
        if not self._is_whole and len(sampled) < len(step.episodes):  # a group's advantages need all of it
            self._unread += len(step.episodes)
            return
        if len(step.digests) != len(step.episodes):
            self._findings.add("digest_missing", f"{step.lineage}/{step.step}", position)
            return
        for episode, reward in step.rewards.items():  # judged with its group: these were trained
            if episode in sampled:
                each = sampled[episode]
                sampled[episode] = msgspec.structs.replace(each, result=msgspec.structs.replace(each.result, reward=reward))
        right = _compute_digests(sampled, self._steps[position])
        for episode, digest in zip(step.episodes, step.digests, strict=True):
            if right.get(episode) == digest:
                self._proven += 1
            else:
                self._findings.add("digest_wrong", episode, position)


def _summarize(result: EpisodeFinished, named: Sequence[Action], plan: CreditPlan) -> Sampled | None:
    """The facts of what one policy has in an episode; None for what cannot be trained at all."""
    try:
        sequence = build_sequence(result, named, [0.0] * len(named), plan, 1.0)
        leaves = list_leaves(named, result.unrewarded_turns)
        digests = tuple(digest_sampled(each) for each in split_sequence(sequence, leaves))
    except (ValueError, IndexError):
        return None
    return Sampled(
        result=msgspec.structs.replace(result, info={}, last_observation="", loss_mask=b""),
        digests=digests,
        loss_mask=np.packbits(sequence.loss_mask, bitorder="little").tobytes(),
        counts=count_trained(result, named),
        leaves=() if is_whole(leaves) else leaves,
    )


def _compute_digests(sampled: dict[str, Sampled], plan: CreditPlan) -> dict[str, bytes]:
    """By episode of one step what its digest has to be; their order is that of the step."""
    groups: dict[str, Group] = {}
    for each in sampled.values():
        group = groups.setdefault(each.result.group_id, Group(group_id=each.result.group_id, size=0))
        group.add(each.result)
    with np.errstate(all="ignore"):  # a reward may be anything: then the books tell
        advantages = compute_episode_advantages(tuple(groups.values()), plan)
    results = [result for group in groups.values() for result in group.graded]
    digests = {}
    for result, by_turn in zip(results, advantages, strict=True):
        each = sampled[result.episode_id]
        bits = np.unpackbits(np.frombuffer(each.loss_mask, np.uint8), count=result.tokens, bitorder="little")
        mask = bits.astype(bool)
        spread = spread_advantages(mask, by_turn, each.counts) if mask.any() else np.zeros(len(mask), np.float32)
        of_leaves = [np.where(mask[leaf.places] & leaf.first, spread[leaf.places], np.float32(0)) for leaf in each.leaves]
        digests[result.episode_id] = join_leaves(list(map(add_advantages, each.digests, of_leaves or [spread])))
    return digests


def _hashes_follow(named: Sequence[Action]) -> bool:
    """True if the last hash of each segment is that of its tokens, those that it keeps of its parent included."""
    turns = [Turn(sequence=0, lane="", action=action) for action in named]
    segments = fold_segments(named)
    expected = hash_segments(turns, segments)
    return all(named[segment.turns[-1]].history_hash == expected[segment.number] for segment in segments)


def _build_plan(started: LineageStarted) -> CreditPlan:
    settings = started.settings
    return CreditPlan.from_settings(
        _build_table(AlgorithmSettings, settings.get("algorithm", {})),
        _build_table(LearnerSettings, settings.get("learner", {})),
        _build_table(EpisodeSettings, settings.get("episode", {})),
    )


def _build_table(kind: type[S], settings: dict[str, bool | int | float | str]) -> S:
    """Build a table of settings: what a later release added is left out; what an earlier one did not know has its default."""
    return msgspec.convert({name: value for name, value in settings.items() if name in kind.__struct_fields__}, kind)


def _get_kind(entry: StreamEntry) -> str:
    return entry.subject.split(".", 3)[2]


def _decode(entry: StreamEntry) -> Message | None:
    try:
        return decode_stored(entry)
    except MalformedMessage:
        return None
