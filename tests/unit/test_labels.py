"""Labels and comments of episodes: what an entry does, what it cannot do, and that many writers leave each entry once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus, PublishAck, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.episode.labels import EpisodeLabels
from fleetbus.errors import SequenceConflict
from fleetbus.log.labels import LabelsRefused, fold_labels, store_labels
from fleetbus.recording.episodes import EpisodeIndex, build_episode_subjects, read_transcript
from fleetbus.recording.export import is_selected
from fleetbus.recording.redaction import Redactor
from fleetbus_schemas import EpisodeFinished, EpisodeLabeled, EpisodeRequested, Message, Subjects, Task, decode, encode
from fleetbus_schemas.channels import BY_NAME, WORKERS
from fleetbus_schemas.label import MAX_CHANGES, MAX_COMMENT_CHARACTERS, MAX_COMMENTS, MAX_LABELS

RUN = "labelled"
SUBJECTS = Subjects(RUN)


def said(**fields: Any) -> EpisodeLabeled:
    return EpisodeLabeled(episode_id="e1", author="tester", **fields)


def entry(sequence: int, message: Message, subject: str = SUBJECTS.label("e1")) -> StreamEntry:
    return StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=sequence * 10**9)


def request(episode: str = "e1") -> EpisodeRequested:
    return EpisodeRequested(
        episode_id=episode, group_id="g", sample_index=0, split="train", task=Task(key="k"), policy="default", deadline_ns=0
    )


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with MemoryServer().connect(RUN, worker="label") as connected:
        await connected.declare(plan_run(RUN))
        await connected.publish(SUBJECTS.task("default", "e1"), encode(request()), expected_last=0)
        yield connected


def test_labels_are_put_on_and_taken_off_and_comments_are_replaced_and_removed() -> None:
    found = fold_labels(
        [
            entry(1, said(add=("good", "odd"), comment="first")),
            entry(2, said(turn=2, add=("odd",), comment="second")),
            entry(3, said(remove=("odd",))),
            entry(4, said(comment="better", replaces=2)),
            entry(5, said(replaces=1)),
            entry(6, said(add=("good",))),
        ]
    )
    assert [(each.name, each.turn, each.time_ns) for each in found.labels] == [("good", None, 10**9), ("odd", 2, 2 * 10**9)]
    assert [(each.sequence, each.text, each.turn) for each in found.comments] == [(4, "better", 2)]
    assert found.names == ("good", "odd")


def test_whatever_was_stored_the_fold_stays_within_its_bounds() -> None:
    found = EpisodeLabels()
    names = ("two words", "[bold]", "", "x" * 49, *(f"n{number}" for number in range(MAX_LABELS + 5)))
    for sequence in range(1, MAX_COMMENTS + 10):
        found.apply(said(add=names, comment="y" * (MAX_COMMENT_CHARACTERS + 5)), sequence, 0)
    assert found.names == tuple(f"n{number}" for number in range(MAX_LABELS))
    assert [len(each.text) for each in found.comments] == [MAX_COMMENT_CHARACTERS] * MAX_COMMENTS


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (said(add=("two words",)), "no label can be called"),
        (said(comment="x" * (MAX_COMMENT_CHARACTERS + 1)), "2,000 characters, this one has 2,001"),
        (said(replaces=99), "there is no comment 99"),
        (said(add=tuple(f"n{number}" for number in range(MAX_LABELS + 1))), "more than 32 labels"),
        (EpisodeLabeled(episode_id="e2", add=("good",)), "there is no episode e2"),
        (EpisodeLabeled(episode_id="e1", add=("good",), author="x" * 201), "200 characters"),
    ],
)
async def test_what_an_episode_cannot_have_is_refused_in_one_line_and_not_stored(
    bus: Bus, message: EpisodeLabeled, fault: str
) -> None:
    before = (await bus.log_state()).last_sequence
    with pytest.raises(LabelsRefused, match=fault) as refused:
        await store_labels(bus, SUBJECTS, message)
    assert "\n" not in str(refused.value)
    assert (await bus.log_state()).last_sequence == before


async def test_a_turn_that_an_episode_did_not_have_is_refused_once_it_is_over(bus: Bus) -> None:
    await store_labels(bus, SUBJECTS, said(turn=3, add=("odd",)))
    result = EpisodeFinished(episode_id="e1", group_id="g", attempt=0, outcome="completed", worker="w", reward=1.0, turns=3)
    await bus.publish(SUBJECTS.episode("e1"), encode(result))
    await store_labels(bus, SUBJECTS, said(turn=2, add=("odd",)))
    with pytest.raises(LabelsRefused, match="episode e1 has 3 turns, from 0 on: none is 3"):
        await store_labels(bus, SUBJECTS, said(turn=3, add=("odd",)))


async def test_a_label_that_a_turn_got_before_the_end_is_taken_off_a_turn_that_did_not_come(bus: Bus) -> None:
    await store_labels(bus, SUBJECTS, said(turn=3, add=("odd",)))
    result = EpisodeFinished(episode_id="e1", group_id="g", attempt=0, outcome="completed", worker="w", reward=1.0, turns=3)
    await bus.publish(SUBJECTS.episode("e1"), encode(result))
    assert (await store_labels(bus, SUBJECTS, said(turn=3, remove=("odd",)))).names == ()


async def test_a_turn_of_an_episode_that_was_lost_is_labelled_as_its_result_counts_none(bus: Bus) -> None:
    result = EpisodeFinished(episode_id="e1", group_id="g", attempt=3, outcome="lost", worker="w")
    await bus.publish(SUBJECTS.episode("e1"), encode(result))
    assert (await store_labels(bus, SUBJECTS, said(turn=1, add=("odd",)))).names == ("odd",)


async def test_an_episode_is_changed_so_often_and_not_once_more(bus: Bus) -> None:
    for number in range(MAX_CHANGES):
        await bus.publish(SUBJECTS.label("e1"), encode(said(add=("odd",)) if number % 2 else said(remove=("odd",))))
    with pytest.raises(LabelsRefused, match="changed 512 times"):
        await store_labels(bus, SUBJECTS, said(add=("good",)))


async def test_two_who_label_at_the_same_time_both_find_theirs_stored_once(bus: Bus) -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(store_labels, bus, SUBJECTS, said(add=(f"n{number}",)))
    stored = await bus.history([SUBJECTS.label("e1")])
    assert len(stored) == 4 and set(fold_labels(stored).names) == {"n0", "n1", "n2", "n3"}


async def test_an_entry_whose_answer_was_lost_is_found_and_not_stored_again(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = bus.publish

    async def lose_the_answer(subject: str, payload: bytes, **options: Any) -> PublishAck:
        await publish(subject, payload, **options)
        raise SequenceConflict(subject, options["expected_last"])  # as of a publish that was sent again

    monkeypatch.setattr(bus, "publish", lose_the_answer)
    found = await store_labels(bus, SUBJECTS, said(add=("good",), comment="once"))
    assert (found.names, len(found.comments)) == (("good",), 1)
    assert len(await bus.history([SUBJECTS.label("e1")])) == 1


async def test_an_episode_that_left_the_log_is_known_by_its_archive(bus: Bus) -> None:
    old = EpisodeLabeled(episode_id="e0", add=("good",), comment="early")
    archived = [
        entry(-2, request("e0"), SUBJECTS.task("default", "e0")),
        entry(-1, old, SUBJECTS.label("e0")),
    ]
    found = await store_labels(
        bus, SUBJECTS, EpisodeLabeled(episode_id="e0", remove=("good",), replaces=-1, comment="late"), archived=archived
    )
    assert (found.names, [each.text for each in found.comments]) == ((), ["late"])


def test_rows_and_transcripts_have_them_and_a_label_alone_makes_no_episode() -> None:
    entries = [
        entry(1, request(), SUBJECTS.task("default", "e1")),
        entry(2, said(add=("good",), comment="fine")),
        entry(3, EpisodeLabeled(episode_id="e9", add=("good",)), SUBJECTS.label("e9")),
        entry(4, EpisodeLabeled(episode_id="e7", add=("forged",)), SUBJECTS.label("e1")),
    ]
    index = EpisodeIndex()
    for each in entries:
        index.add(each)
    assert {name: (row.labels, row.comments) for name, row in index.rows.items()} == {"e1": (("good",), ("fine",))}
    transcript = read_transcript(entries[:2])
    assert ([each.name for each in transcript.labels], [each.text for each in transcript.comments]) == (["good"], ["fine"])
    assert SUBJECTS.label("e1") in build_episode_subjects(SUBJECTS, "e1")
    assert is_selected(SUBJECTS.label("e1"), {"e1"}) and not is_selected(SUBJECTS.label("e2"), {"e1"})
    index.forget("e1")
    assert not index.rows


def test_no_role_that_works_reads_or_writes_labels() -> None:
    assert {use.role for use in BY_NAME["labels"].uses} & set(WORKERS) == set()
    assert BY_NAME["labels"].senders == ("operator",)


def test_secrets_in_a_comment_are_taken_out_of_what_is_exported() -> None:
    secret = "sk-ant-api03-" + "a1B2" * 12
    cleaned = Redactor().clean(entry(1, said(add=("leak",), comment=f"it prints {secret} here")))
    message = decode(EpisodeLabeled, cleaned.payload)
    assert secret not in message.comment and message.comment.startswith("it prints ") and message.add == ("leak",)
