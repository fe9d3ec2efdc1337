"""A log that is right, forged: whatever its audit is to find is put into a copy of it, and has to be named with its id.

An audit that balances says something only if it would not balance otherwise. Each kind of forgery has an episode of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.audit.books import Audit
from fleetbus.core.audit.findings import MAX_IDS
from fleetbus_schemas import (
    Action,
    AttemptReleased,
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSeat,
    EpisodeSegment,
    Exclusion,
    FloorRaised,
    LineageStarted,
    Message,
    Observation,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
    VersionSpan,
)
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode_any
from tests.simulation.observer import GARBAGE, Observer
from tests.simulation.scenario.shape import POLICY

FAR = 1000
"""Added to a number it makes one that stands nowhere else in a log."""

JUDGED = ("task", "obs", "act", "episode", "policy", "train", "floor")

Log = dict[int, tuple[str, Message | None]]
"""By position subject and message, None for what an audit does not look into."""

Pages = dict[type[Message], list[tuple[int, Any]]]
"""The messages of one episode by type, each with its position."""


def _other(**fields: Any) -> Callable[[Any], Any]:
    return lambda message: msgspec.structs.replace(message, **fields)


def _release(claim: AttemptStarted) -> AttemptReleased:
    return AttemptReleased(episode_id=claim.episode_id, attempt=claim.attempt, worker=claim.worker)


def _unpublish(action: Action) -> Action:
    versions = tuple(VersionSpan(version=span.version + FAR, start=span.start, stop=span.stop) for span in action.versions)
    return msgspec.structs.replace(action, versions=versions)


INSTEAD: tuple[tuple[str, type[Message], Callable[[Any], Any]], ...] = (
    ("never_requested", EpisodeRequested, lambda request: None),
    ("claim_out_of_order", AttemptStarted, lambda claim: msgspec.structs.replace(claim, attempt=claim.attempt + FAR)),
    ("observed_unclaimed", Observation, lambda shown: msgspec.structs.replace(shown, attempt=shown.attempt + FAR)),
    ("action_unobserved", Observation, lambda shown: None),
    ("action_unobserved", Action, lambda action: msgspec.structs.replace(action, turn=-1)),
    ("version_unpublished", Action, _unpublish),
    ("action_missing", Action, lambda action: None),
    ("history_hash_wrong", Action, _other(history_hash=b"forged")),
    ("logprobs_missing", Action, _other(logprobs=b"")),
    ("versions_missing", Action, _other(versions=())),
    ("result_not_newest", EpisodeFinished, lambda result: msgspec.structs.replace(result, attempt=result.attempt + FAR)),
    ("actions_not_history", EpisodeFinished, lambda result: msgspec.structs.replace(result, actions=result.actions * 2)),
    ("segments_wrong", EpisodeFinished, _other(segments=(EpisodeSegment(origin=None, first_turn=0, turns=FAR, tokens=0),))),
    ("seats_wrong", EpisodeFinished, _other(seats=(EpisodeSeat(name="forged", turns=(FAR,)),))),
    ("loss_mask_length", EpisodeFinished, lambda result: msgspec.structs.replace(result, tokens=result.tokens + FAR)),
    ("loss_mask_unsampled", EpisodeFinished, lambda result: _other(loss_mask=b"\xff" * len(result.loss_mask))(result)),
    ("reward_not_of_outcome", EpisodeFinished, _other(reward=None)),
    ("reward_not_finite", EpisodeFinished, _other(reward=math.inf)),
    ("result_not_of_request", EpisodeFinished, _other(group_id="forged")),
)
"""What is put in the place of an episode's first message of a type (None: nothing that an audit looks into)."""

AGAIN: tuple[tuple[str, type[Message], Callable[[Any], Any]], ...] = (
    ("requested_twice", EpisodeRequested, lambda request: request),
    ("claim_after_result", AttemptStarted, lambda claim: claim),
    ("release_not_newest", AttemptStarted, _release),
    ("second_result", EpisodeFinished, lambda result: result),
    ("misfiled", EpisodeFinished, _other(episode_id="forged")),
)
"""What is stored once more, at the end."""


def check_forgeries(observer: Observer, entries: Sequence[StreamEntry], seed: int) -> None:
    """Report every forgery that the audit does not name. To logs from which something has left only what comes late is added:
    it is refused there, and no finding."""
    log: Log = {entry.sequence: (entry.subject, _decode(entry)) for entry in entries}
    episodes = _list_plain_episodes(log)
    floor = max((message.sequence for _, message in log.values() if isinstance(message, FloorRaised)), default=0)
    if floor:
        _check_late(observer, log, [pages for pages in episodes if pages[EpisodeRequested][0][0] < floor])
    if floor or len(episodes) < len(INSTEAD) + len(AGAIN) + 5:
        return
    draw = random.Random(f"forgeries/{seed}")
    draw.shuffle(episodes)
    _require_found(observer, *_forge_floor(log, draw.choice(episodes)))
    _require_found(observer, *_forge_settlement(log))
    expected: list[tuple[str, str]] = []
    for kind, message_type, forge in INSTEAD:
        pages = episodes.pop()
        sequence, message = pages[message_type][0]
        log[sequence] = (log[sequence][0], forge(message))
        expected.append((kind, pages[EpisodeFinished][0][1].episode_id))
    for kind, message_type, forge in AGAIN:
        sequence, message = episodes.pop()[message_type][0]
        log[max(log) + 1] = (log[sequence][0], forge(message))
        expected.append((kind, message.episode_id))
    expected += [name for pages in episodes[:1] for name in _forge_repetition(log, pages)]
    untouched = [pages[EpisodeFinished][0][1].episode_id for pages in episodes]
    trained = sorted({subject.rpartition(".")[2] for subject, message in log.values() if isinstance(message, StepTrained)})
    expected += _forge_training(log, untouched, draw.choice(trained))
    _require_found(observer, log, expected)


def _require_found(observer: Observer, log: Log, expected: Sequence[tuple[str, str]]) -> None:
    found = {finding.kind: finding for finding in _audit(log).report().findings}
    for kind, name in expected:
        named = kind in found and (name in found[kind].ids or len(found[kind].ids) == MAX_IDS)
        observer.require(named, "the audit names what was forged", f"{kind}: {name}")


def _check_late(observer: Observer, log: Log, passed: list[Pages]) -> None:
    """Copies of an episode's entries that come when the floor has passed it change no book; one out of order is an error."""
    if not passed:
        return
    copies = [log[pages[0][0]] for pages in passed[0].values()]
    late = dict(log)
    for copy in copies:
        late[max(late) + 1] = copy
    before, after = _audit(log), _audit(late)
    right = before.report().findings == after.report().findings
    right = right and after.report().refused == before.report().refused + len(copies)
    observer.require(right, "an audit refuses what comes late", passed[0][EpisodeRequested][0][1].episode_id)
    try:
        after.enter(1, *log[1])
    except ValueError:
        return
    observer.violate("an audit refuses a log out of order", "entry 1 at the end")


def _audit(log: Log) -> Audit:
    audit = Audit()
    for sequence, (subject, message) in sorted(log.items()):
        audit.enter(sequence, subject, message)
    return audit


def _decode(entry: StreamEntry) -> Message | None:
    kind = entry.subject.split(".", 3)[2]
    if kind not in JUDGED or entry.payload == GARBAGE:
        return None
    return decode_any(STORED[kind], entry.payload, subject=entry.subject)


def _list_plain_episodes(log: Log) -> list[Pages]:
    """Episodes that were completed at the first attempt, with one observation and one Action per turn, and a prompt."""
    found: dict[str, Pages] = {}
    for sequence, (_, message) in log.items():
        if isinstance(message, EpisodeRequested | AttemptStarted | Observation | Action | EpisodeFinished):
            found.setdefault(message.episode_id, {}).setdefault(type(message), []).append((sequence, message))
    return [pages for _, pages in sorted(found.items()) if _is_plain(pages)]


def _is_plain(pages: Pages) -> bool:
    counts = [len(pages.get(kind, ())) for kind in (EpisodeRequested, AttemptStarted, Observation, Action, EpisodeFinished)]
    if counts[:2] != [1, 1] or counts[4] != 1 or counts[2] != counts[3] or not counts[3]:
        return False
    if not pages[Observation][0][1].trained:  # what another policy says of versions is its own
        return False
    first, result = pages[Action][0][1], pages[EpisodeFinished][0][1]
    sampled = all(action.sampled and action.prompt_delta and action.turn == at for at, (_, action) in enumerate(pages[Action]))
    return sampled and result.outcome == "completed" and len(result.actions) == counts[3] and first.attempt == 1


def _forge_floor(log: Log, pages: Pages) -> tuple[Log, list[tuple[str, str]]]:
    """A floor above an episode that is being played, in the place of its first observation."""
    sequence, shown = pages[Observation][0]
    subject = log[sequence][0].split(".obs.")[0] + ".floor"
    return {**log, sequence: (subject, FloorRaised(sequence=sequence))}, [("floor_unsettled", shown.episode_id)]


def _forge_repetition(log: Log, pages: Pages) -> list[tuple[str, str]]:
    """The first Action once more, in the place of the second observation, if there is one."""
    if len(pages[Observation]) == 1:
        return []
    sequence, action = pages[Action][0]
    log[pages[Observation][1][0]] = (log[sequence][0], action)
    return [("action_repeated", action.episode_id)]


def _forge_settlement(log: Log) -> tuple[Log, list[tuple[str, str]]]:
    """Training that has finished, of which the last step leaves a group out, and a checkpoint that covers it all the same."""
    own = {sequence: message for sequence, (subject, message) in log.items() if subject.endswith(f".{POLICY}")}
    lineages = [message.lineage for message in own.values() if isinstance(message, LineageStarted)]
    ends = [message for message in own.values() if isinstance(message, TrainingFinished)]
    sequence, step = [(sequence, message) for sequence, message in own.items() if isinstance(message, StepTrained)][-1]
    groups = {episode.rpartition("-")[0] for episode in step.episodes}
    left_out = sorted(episode for episode in step.episodes if episode.startswith(f"{min(groups)}-"))
    asked = {message.episode_id: (at, message) for at, (_, message) in log.items() if isinstance(message, EpisodeRequested)}
    requests = [asked[episode] for episode in left_out]
    is_whole = all((each.lineage, each.group_size) == (lineages[-1], len(left_out)) for _, each in requests)
    if step.lineage != lineages[-1] or not ends or not is_whole:
        return log, []
    kept = tuple(episode for episode in step.episodes if episode not in left_out)
    forged: Log = {**log, sequence: (log[sequence][0], msgspec.structs.replace(step, episodes=kept, digests=()))}
    expected = [("finished_unsettled", episode) for episode in left_out]
    for position, (subject, message) in log.items():
        if position > sequence and position in own and isinstance(message, CheckpointStored):
            forged[position] = (
                subject,
                msgspec.structs.replace(message, floor=max(message.floor, *(at + 1 for at, _ in requests))),
            )
            expected += [("below_floor_unsettled", episode) for episode in left_out]
            break
    return forged, expected


def _forge_training(log: Log, untouched: list[str], policy: str) -> list[tuple[str, str]]:
    """A step, versions and a lineage that no learner of this policy would have stored, at the end of the log."""
    own = [(subject, message) for subject, message in log.values() if subject.endswith(f".{policy}")]
    steps = [(subject, message) for subject, message in own if isinstance(message, StepTrained)]
    lineages = [(subject, message) for subject, message in own if isinstance(message, LineageStarted)]
    policies = [(subject, message) for subject, message in own if isinstance(message, PolicyPublished)]
    requests = [message for _, message in log.values() if isinstance(message, EpisodeRequested)]
    splits = {each.episode_id: each.split for each in requests if policy in each.trained_policies}
    subject, last = steps[-1]
    trained = [episode for episode in last.episodes if episode in untouched]
    evaluated = [episode for episode in untouched if splits.get(episode) == "eval"]
    if len(trained) < 3 or not evaluated or lineages[-1][1].lineage != last.lineage:
        return []
    twice, both, nobody, forged = trained[0], trained[1], f"{last.lineage}-forged", msgspec.structs.replace
    for sequence, (where, result) in log.items():
        if isinstance(result, EpisodeFinished) and result.episode_id == trained[2]:
            log[sequence] = (where, forged(result, outcome="lost", reward=None))
    exclusions = (both, nobody, nobody)
    reasons = ("stale", "", "stale")
    excluded = tuple(Exclusion(episode_id=name, reason=reason) for name, reason in zip(exclusions, reasons, strict=True))
    step = forged(last, step=last.step + FAR, episodes=(twice, evaluated[0]), excluded=excluded, digests=())
    lineage = forged(lineages[-1][1], lineage="l999999", parent=last.lineage, parent_step=last.step + 2 * FAR)
    for where, message in ((subject, step), (subject, lineage), (subject, last), policies[-1]):
        log[max(log) + 1] = (where, message)
    log[max(log) + 2] = (subject, None)
    account = "" if policy == POLICY else f"@{policy}"
    return [
        ("trained_twice", f"{twice}{account}"),
        ("trained_without_result", f"{trained[2]}{account}"),
        ("never_requested" if account else "evaluation_settled", f"{evaluated[0]}{account}"),  # who joins has no account of one
        ("trained_and_excluded", f"{both}{account}"),
        ("excluded_without_reason", nobody),
        ("excluded_twice", nobody),
        ("never_requested", nobody),
        ("step_out_of_order", f"{step.lineage}/{step.step}"),
        ("lineage_unfounded", f"{lineage.lineage}/{lineage.parent_step}"),
        ("lineage_replaced", f"{last.lineage}/{last.step}"),
        ("version_repeated", f"{policy}/{policies[-1][1].version}"),
        ("entries_missing", f"{max(log) - 1}-{max(log) - 1}"),
    ]
