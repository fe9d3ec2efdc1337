"""Full-text search over what was said: an index that continues, that is made anew when it must, and that no text can break."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.recording.said_text import MAX_CHARACTERS, SaidText, find_said_text
from fleetbus.recording.text_index import TextIndex
from fleetbus.recording.text_query import build_match
from fleetbus_schemas import Action, ChatMessage, Message, Observation, Subjects, encode
from fleetbus_schemas.chat import Image, Text, ToolCall

SUBJECTS = Subjects("r")


def say(sequence: int, episode: str, text: str, turn: int = 0, role: str = "assistant") -> SaidText:
    return SaidText(sequence, episode, turn, role, text)


def as_entry(message: Message, sequence: int = 7) -> StreamEntry:
    is_action = isinstance(message, Action)
    subject = SUBJECTS.action("e0", "e1") if is_action else SUBJECTS.observation("default", "any", "e1")
    return StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=1)


def observe(*messages: ChatMessage, hop: int = 0) -> Observation:
    return Observation(
        episode_id="e1", attempt=1, turn=3, policy="default", tokens_left=9, environment_lane="e0", deadline_ns=0,
        messages=messages, hop=hop,
    )  # fmt: skip


def test_words_are_found_in_one_turn_whatever_their_case_and_accents(tmp_path: Path) -> None:
    with TextIndex(tmp_path / "t", "log") as index:
        index.add([say(1, "a", "Die Müllabfuhr kam"), say(2, "b", "it came late"), say(3, "a", "and late", 1)], 3)
        assert index.find_episodes("mullabfuhr KAM") == {"a"}
        assert index.find_episodes("late") == {"a", "b"}
        assert index.find_episodes("kam late") == set(), "words of two turns"
        assert index.find_episodes('"came it"') == set() and index.find_episodes('"it came"') == {"b"}
        assert index.find_episodes("müll*") == {"a"} and index.find_episodes("müll") == set()
        found = index.describe("late", ["a", "b", "gone"])
        assert [*found] == ["a", "b"]
        assert (found["a"].turn, found["a"].role, found["a"].parts, found["a"].texts) == (
            1,
            "assistant",
            ("and ", "late", ""),
            1,
        )


def test_an_index_continues_after_its_last_entry_and_ignores_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "t"
    with TextIndex(file, "log") as index, TextIndex(file, "log") as other:
        index.add([say(1, "a", "one")], 2)
        other.add([say(1, "a", "one"), say(5, "a", "one more")], 5)
        assert index.last_sequence == other.last_sequence == 5
        assert index.describe("one", ["a"])["a"].texts == 2
    with TextIndex(file, "log") as index:
        assert (index.last_sequence, index.find_episodes("more")) == (5, {"a"})
    assert file.stat().st_mode & 0o77 == 0, "transcripts are not for other users"


def test_a_file_of_another_log_or_damaged_or_deleted_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "t"
    with TextIndex(file, "log") as index:
        index.add([say(1, "a", "one")], 1)
    with TextIndex(file, "another") as index:
        assert index.last_sequence == 0
        index.add([say(1, "a", "one")], 1)
        file.unlink()
        assert index.last_sequence == 0
        index.add([say(1, "a", "two")], 1)
        assert index.find_episodes("two") == {"a"}
    file.write_bytes(b"\x00" * 8192)
    with TextIndex(file, "another") as index:
        assert index.last_sequence == 0
    file.write_bytes(b"not a database, whatever its name says" * 99)
    with TextIndex(file, "another") as index:
        index.add([say(1, "a", "three")], 1)
        assert index.find_episodes("three") == {"a"}


def test_an_index_that_was_closed_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    with TextIndex(tmp_path / "t", "log") as index:
        index.add([say(1, "a", "one")], 1)
    with pytest.raises(sqlite3.ProgrammingError):
        index.find_episodes("one")
    with TextIndex(tmp_path / "t", "log") as index:
        assert index.last_sequence == 1


def test_an_index_that_is_damaged_while_it_is_open_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "t"
    with TextIndex(file, "log") as index:
        index.add([say(number, f"e{number}", f"word{number} " * 50) for number in range(1, 400)], 400)
        with file.open("r+b") as content:
            content.seek(4096)
            content.write(b"\xff" * (file.stat().st_size - 4096))
        other = sqlite3.connect(file)
        with contextlib.suppress(sqlite3.DatabaseError):
            other.execute("PRAGMA user_version = 7")  # so that what the connection has in memory is read again
        other.close()
        with pytest.raises(sqlite3.DatabaseError):
            for number in range(1, 400):
                index.find_episodes(f"word{number}")
        assert index.last_sequence == 0
        index.add([say(1, "a", "one")], 1)
        assert index.find_episodes("one") == {"a"}


def test_texts_of_the_oldest_episodes_leave_an_index_that_is_full(tmp_path: Path) -> None:
    words = random.Random(1)
    with TextIndex(tmp_path / "t", "log", max_bytes=1 << 20) as index:
        for batch in range(40):
            texts = [say(batch * 50 + n + 1, f"e{batch}-{n}", f"batch{batch} {words.randbytes(400).hex()}") for n in range(50)]
            index.add(texts, batch * 50 + 50)
        assert index.find_episodes("batch0") == set()
        assert len(index.find_episodes("batch39")) == 50
        assert index.last_sequence == 2000
    assert (tmp_path / "t").stat().st_size < 3 << 20


@pytest.mark.parametrize(
    "text",
    ['a" OR text:*', "NEAR(a b)", "a AND NOT b", "-a", "^a", "a:b", '"', '"a', "a\x00b", "a\ud800", "(a", "text : a",
      "a" * 9000, "a " * 900, "\u0301a"],
)  # fmt: skip
def test_no_text_breaks_a_query(tmp_path: Path, text: str) -> None:
    with TextIndex(tmp_path / "t", "log") as index:
        index.add([say(1, "e", text), say(2, "f", "nothing")], 2)
        try:
            assert index.find_episodes(text) <= {"e"}
        except UserError as refused:
            assert "nothing to search for" in str(refused)


@pytest.mark.integration
def test_random_texts_break_neither_index_nor_query(tmp_path: Path) -> None:
    source = random.Random(7)
    letters = "ab\"*()^:-+{}\x00\x01\x02\x03\n'\\;é中\ud800\U0001f600 "
    with TextIndex(tmp_path / "t", "log") as index:
        for number in range(300):
            text = "".join(source.choices(letters, k=source.randrange(12)))
            index.add([say(number + 1, f"e{number}", text)], number + 1)
            try:
                found = index.find_episodes(text)
            except UserError:
                continue
            assert all("".join(each.parts).count("\x02") == 0 for each in index.describe(text, sorted(found)).values())


def test_a_search_without_a_word_is_refused() -> None:
    for text in ("", "  ", '""', "*", "-- ;"):
        with pytest.raises(UserError, match="nothing to search for"):
            build_match(text)


def test_the_text_of_a_turn_is_what_was_shown_without_instructions_and_what_was_answered() -> None:
    parts = (Text(text="look"), Image(object="0" * 64))
    shown = observe(ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=parts))
    assert find_said_text(as_entry(shown)) == SaidText(7, "e1", 3, "user", "look")
    call = ToolCall(name="search", arguments={"for": "it"})
    answered = Action(episode_id="e1", attempt=1, turn=3, text="I search.", tool_calls=(call,))
    assert find_said_text(as_entry(answered)) == SaidText(7, "e1", 3, "assistant", 'I search.\nsearch {"for":"it"}')
    assert find_said_text(as_entry(observe(ChatMessage(role="user", content="again"), hop=1))) is None
    assert find_said_text(as_entry(observe(ChatMessage(role="system", content="Be brief.")))) is None
    long = find_said_text(as_entry(observe(ChatMessage(role="tool", content="x" * 99_999))))
    assert long is not None and len(long.text) == MAX_CHARACTERS
