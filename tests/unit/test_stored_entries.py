"""Entries of the log in somebody else's name: subjects of wildcards, and messages that name another than their subject."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.log.stored_entries import decode_one, decode_stored
from fleetbus_schemas import (
    Action,
    EpisodeRequested,
    MalformedMessage,
    Message,
    Observation,
    SeatPolicy,
    SessionClaimed,
    SessionEnded,
    Subjects,
    Task,
    encode,
)

SUBJECTS = Subjects("run")
OBSERVATION = Observation(
    episode_id="e1", attempt=1, turn=0, policy="default", messages=(), tokens_left=1, environment_lane="e0", deadline_ns=1
)
ACTION = Action(episode_id="e1", attempt=1, turn=0, text="t")
CLAIM = SessionClaimed(session="s1", attempt=1, worker="w", nonce="n", task=Task(key="t"))
OWN: dict[str, Message] = {
    SUBJECTS.observation("default", "any", "e1"): OBSERVATION,
    SUBJECTS.action("e0", "e1"): ACTION,
    SUBJECTS.session("s1"): CLAIM,
}
OTHERS: list[tuple[str, Message]] = [
    (SUBJECTS.observation("other", "any", "e1"), OBSERVATION),
    (SUBJECTS.observation("default", "any", "e2"), OBSERVATION),
    (SUBJECTS.action("e0", "e2"), ACTION),
    (SUBJECTS.session("s2"), CLAIM),
    ("fb.run.session.*", SessionEnded(session="s1", end="closed")),
    ("fb.run.act.*.e1", ACTION),
]


def store(subject: str, payload: bytes) -> StreamEntry:
    return StreamEntry(subject=subject, payload=payload, sequence=1, time_ns=1)


@pytest.mark.parametrize("subject", OWN)
def test_an_entry_that_names_its_subject_is_read(subject: str) -> None:
    entry = store(subject, encode(OWN[subject]))
    assert decode_stored(entry) == OWN[subject] == decode_one(type(OWN[subject]), entry)


@pytest.mark.parametrize(("subject", "message"), OTHERS)
def test_an_entry_that_names_another_than_its_subject_is_malformed(subject: str, message: Message) -> None:
    with pytest.raises(MalformedMessage, match=r"names another one|not made of names"):
        decode_stored(store(subject, encode(message)))


@pytest.mark.parametrize("bad", ["x.y", "*", ">", "", "a b", "a\n", "a\x00", "\u00e4", "a" * 129])
@pytest.mark.parametrize(
    ("message", "field"),
    [(OBSERVATION, "environment_lane"), (OBSERVATION, "policy"), (ACTION, "lane"), (CLAIM, "worker"), (CLAIM, "session")],
)
def test_a_name_that_is_no_token_of_a_subject_is_malformed(message: Message, field: str, bad: str) -> None:
    subject = next(subject for subject, own in OWN.items() if own is message)
    changed: Any = msgspec.structs.replace(message, **{field: bad})
    if (field, bad) == ("lane", ""):  # an Action of a worker without a lane
        assert decode_stored(store(subject, encode(changed))) == changed
        return
    with pytest.raises(MalformedMessage):
        decode_stored(store(subject, encode(changed)))


@pytest.mark.parametrize("field", ["turn", "attempt", "segment"])
@pytest.mark.parametrize("bad", [-1, 2**31, 2**63])
def test_numbers_that_no_column_holds_are_malformed(field: str, bad: int) -> None:
    with pytest.raises(MalformedMessage):
        decode_stored(store(SUBJECTS.action("e0", "e1"), encode(msgspec.structs.replace(ACTION, **{field: bad}))))


@pytest.mark.parametrize("bad", ["x.y", "*", ">", ""])
def test_a_request_whose_seat_is_played_by_what_is_no_policys_name_is_malformed(bad: str) -> None:
    """Its worker would ask for turns on a subject of that name, where nothing is published."""
    seats = (SeatPolicy(seat="user", policy=bad),)
    request = EpisodeRequested(
        episode_id="e1", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="p", deadline_ns=1, seats=seats
    )
    with pytest.raises(MalformedMessage):
        decode_stored(store(SUBJECTS.task("default", "e1"), encode(request)))
