"""A recording holds what the log held: whole, torn, damaged, cleaned of secrets, or reduced to some episodes."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.log.archive_format import MAX_RECORD_BYTES, encode_frame
from fleetbus.recording import RecordingDamaged, RecordingHeader, RecordingReader, load_recording
from fleetbus.recording.export import Export, is_selected, restore_files
from fleetbus.recording.format import MAGIC, compute_message_schema, encode_start
from fleetbus.recording.redaction import Redactor, find_environment_secrets, is_wiped
from fleetbus.recording.writer import FRAME_ENTRIES, create_recording
from fleetbus_schemas import Action, ChatMessage, EpisodeFinished, EpisodeRequested, Message, Observation, Task, decode, encode
from fleetbus_schemas.tokens import pack_ids, pack_logprobs

HEADER = RecordingHeader(run="r", messages=compute_message_schema(), configuration={"learner": {"steps": 3}})


def entries(count: int, *, start: int = 1, size: int = 40) -> list[StreamEntry]:
    return [
        StreamEntry(
            subject=f"fb.r.act.e0.ep{number % 7}", payload=bytes([number % 256]) * size, sequence=number, time_ns=number * 10
        )
        for number in range(start, start + count)
    ]


def written(path: Path, content: list[StreamEntry]) -> Path:
    with create_recording(path, HEADER) as writer:
        writer.add(content)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    content = entries(3 * FRAME_ENTRIES + 5)
    recording = load_recording(written(tmp_path / "a.fbrec", content))
    assert recording.entries == content
    assert recording.header == HEADER and recording.run == "r" and recording.torn == ""


def test_an_empty_recording_is_whole(tmp_path: Path) -> None:
    recording = load_recording(written(tmp_path / "a.fbrec", []))
    assert recording.entries == [] and recording.torn == "" and recording.seconds == 0


def test_files_travel_with_the_log(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(bytes(range(256)) * 40_000)
    with create_recording(tmp_path / "a.fbrec", HEADER) as writer:
        writer.add(entries(3))
        writer.add_file("weights.bin", weights)
    recording = load_recording(tmp_path / "a.fbrec")
    assert len(recording.entries) == 3
    assert restore_files(recording.files, tmp_path / "out")["weights.bin"].read_bytes() == weights.read_bytes()


def test_a_recorded_file_cannot_leave_its_folder(tmp_path: Path) -> None:
    paths = restore_files({"../../outside": b"x"}, tmp_path / "in")
    assert paths["../../outside"] == tmp_path / "in" / "outside"


@pytest.mark.parametrize("name", ["..", "", "policies/p/..", "a\0b", "a" * 300])
def test_what_is_no_name_of_a_file_is_left_out(name: str, tmp_path: Path) -> None:
    restored = restore_files({name: b"x", "l1-v000001.safetensors": b"y"}, tmp_path)
    assert restored == {"l1-v000001.safetensors": tmp_path / "l1-v000001.safetensors"}


@pytest.mark.parametrize("lost_bytes", [1, 7, 30, 400])
def test_a_torn_tail_is_noticed_and_the_rest_is_readable(tmp_path: Path, lost_bytes: int) -> None:
    content = entries(2 * FRAME_ENTRIES)
    path = written(tmp_path / "a.fbrec", content)
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    recording = load_recording(path)
    assert recording.entries in (content, content[:FRAME_ENTRIES])
    assert recording.torn.startswith(str(path))


def test_a_writer_that_is_killed_leaves_what_it_flushed(tmp_path: Path) -> None:
    path = tmp_path / "a.fbrec"

    class Killed(Exception):
        pass

    with pytest.raises(Killed), create_recording(path, HEADER) as writer:
        writer.add(entries(3))
        writer.flush()
        writer.add(entries(3, start=4))
        raise Killed
    recording = load_recording(path)
    assert [entry.sequence for entry in recording.entries] == [1, 2, 3]
    assert "its writer was cut off after 3 entries" in recording.torn


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_no_part_of_a_recording_unless_it_had_its_place_already(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "a.fbrec"
    if overwrite:
        written(path, entries(2))
    with pytest.raises(OSError, match="No space"), create_recording(path, HEADER, overwrite=overwrite) as writer:
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [each.name for each in tmp_path.iterdir()] == (["a.fbrec"] if overwrite else [])
    with pytest.raises(OSError, match="No space"), create_recording(path, HEADER, overwrite=overwrite) as writer:
        writer.add(entries(3))
        writer.flush()
        writer.take_place()
        raise OSError(errno.ENOSPC, "No space left on device")
    assert load_recording(path).entries == entries(3)


def test_a_flipped_bit_ends_the_recording_before_it(tmp_path: Path) -> None:
    path = written(tmp_path / "a.fbrec", entries(3 * FRAME_ENTRIES))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    reader = RecordingReader(path)
    assert len(list(reader.entries())) in (0, FRAME_ENTRIES, 2 * FRAME_ENTRIES)
    assert "is damaged at byte" in reader.torn


@pytest.mark.parametrize(
    "content", [b"", b"short", b"x" * 100, MAGIC, MAGIC + b"\1\2", MAGIC + encode_frame(b"\xc1"), MAGIC + encode_frame(b"\x80")]
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.fbrec"
    path.write_bytes(content)
    with pytest.raises(RecordingDamaged) as caught:
        load_recording(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_later_format_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.fbrec"
    path.write_bytes(encode_start(msgspec.structs.replace(HEADER, format=99)))
    with pytest.raises(UserError, match=r"format 99.*upgrade"):
        load_recording(path)


@pytest.mark.integration
def test_a_frame_that_unpacks_to_too_much_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.fbrec"
    bomb = b"E" + zlib.compress(bytes(80 << 20), 9)
    assert len(bomb) < MAX_RECORD_BYTES
    path.write_bytes(encode_start(HEADER) + encode_frame(bomb))
    assert "is damaged" in load_recording(path).torn


def test_an_existing_file_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = written(tmp_path / "a.fbrec", entries(2))
    with pytest.raises(UserError, match="exists already"), create_recording(path, HEADER):
        raise AssertionError
    assert len(load_recording(path).entries) == 2
    with create_recording(path, HEADER, overwrite=True):
        pass
    assert load_recording(path).entries == []


def test_a_file_that_is_replaced_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "a.fbrec", entries(2))
    for error in (UserError("no such episode"), OSError("no space left")):
        with pytest.raises(type(error)), create_recording(path, HEADER, overwrite=True) as writer:
            writer.add(entries(1))
            raise error
        assert len(load_recording(path).entries) == 2
        assert list(tmp_path.iterdir()) == [path]


def test_a_recording_that_follows_a_log_takes_the_place_of_the_old_one_while_it_is_written(tmp_path: Path) -> None:
    path = written(tmp_path / "a.fbrec", entries(2))
    with create_recording(path, HEADER, overwrite=True) as writer:
        writer.add(entries(3))
        writer.flush()
        writer.take_place()
        assert len(load_recording(path).entries) == 3
        writer.add(entries(1))
    assert len(load_recording(path).entries) == 4 and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"), create_recording(tmp_path / "no" / "a.fbrec", HEADER):
        raise AssertionError


def test_bad_input_removes_the_file_that_it_began_but_no_pipe_or_device(tmp_path: Path) -> None:
    file, pipe = tmp_path / "a.fbrec", tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (file, pipe):
        with pytest.raises(UserError, match="no such episode"), create_recording(path, HEADER, overwrite=True):
            raise UserError("no such episode")
    os.close(reader)
    assert not file.exists()
    assert pipe.is_fifo()


def test_some_episodes_can_be_selected(tmp_path: Path) -> None:
    assert is_selected("fb.r.obs.default.any.ep1", {"ep1"}) and is_selected("fb.r.policy.default", {"ep1"})
    assert not is_selected("fb.r.task.default.ep2", {"ep1"}) and not is_selected("fb.r.train.default", {"default"})
    with create_recording(tmp_path / "a.fbrec", HEADER) as writer:
        Export(writer, redactor=None, selected={"ep3"}).write(entries(70))
    assert {entry.subject for entry in load_recording(tmp_path / "a.fbrec").entries} == {"fb.r.act.e0.ep3"}


# Secrets

SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"


def cleaned(message: Message, redactor: Redactor | None = None) -> Any:
    entry = StreamEntry(subject="fb.r.x", payload=encode(message), sequence=1, time_ns=1)
    return decode(type(message), (redactor or Redactor()).clean(entry).payload)


def observation(text: str, *, turn: int = 0) -> Observation:
    return Observation(
        episode_id="e",
        attempt=1,
        turn=turn,
        policy="p",
        messages=(ChatMessage(role="tool", content=text),),
        tokens_left=5,
        environment_lane="e0",
        deadline_ns=1,
    )


def action(text: str = "fine", *, turn: int = 0) -> Action:
    return Action(
        episode_id="e",
        attempt=1,
        turn=turn,
        text=text,
        prompt_delta=pack_ids([7, 8]),
        sampled=pack_ids([9]),
        logprobs=pack_logprobs([-1.0]),
    )


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcdefghijklmnop", "abcdefghijklmnop"),
        ("connect to nats://user:hunter2pass@host:4222", "hunter2pass"),
        ("postgres://admin:hunter2pass@db/x is down", "hunter2pass"),
        (f"the seed is {SEED}", SEED),
        ("key sk-proj-abcdefghijklmnopqrstu", "sk-proj-abcdefghijklmnopqrstu"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "hf_abcdefghijklmnopqrstuvwxyz"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4", "SflKxwRJSMeKKF2QT4"),
        ('{"api_key": "q8w7e6r5t4"}', "q8w7e6r5t4"),
        ("password=q8w7e6r5t4", "q8w7e6r5t4"),
        ("ACCESS_TOKEN: q8w7e6r5t4", "q8w7e6r5t4"),
    ],
)
def test_secrets_in_text_do_not_reach_the_file(tmp_path: Path, text: str, secret: str) -> None:
    path = tmp_path / "a.fbrec"
    entry = StreamEntry(subject="fb.r.obs.p.any.e", payload=encode(observation(text)), sequence=1, time_ns=1)
    redactor = Redactor()
    with create_recording(path, HEADER) as writer:
        Export(writer, redactor=redactor).write([entry])
    kept = load_recording(path).entries[0].payload
    assert secret.encode() not in kept
    assert redactor.redacted == 1


@pytest.mark.parametrize(
    "text",
    [
        "12 tokens: 5",
        "the seed is 7",
        "https://example.org/a?b=c",
        "a token of respect",
        "max_tokens=64 seed=4",
        "skip-list sk-x",
    ],
)
def test_innocent_text_stays(text: str) -> None:
    entry = StreamEntry(subject="fb.r.x", payload=encode(observation(text)), sequence=1, time_ns=1)
    assert Redactor().clean(entry) is entry


def test_a_secret_of_a_task_is_taken_out_wherever_it_comes_back() -> None:
    redactor = Redactor()
    task = Task(key="t", env_variables={"API_KEY": "plain-but-secret", "REGION": "north"})
    request = EpisodeRequested(
        episode_id="e", group_id="g", sample_index=0, split="train", task=task, policy="p", deadline_ns=1
    )
    assert cleaned(request, redactor).task.env_variables == {"API_KEY": "[redacted]", "REGION": "north"}
    assert cleaned(observation("it said plain-but-secret!"), redactor).messages[0].content == "it said [redacted]!"


def test_token_ids_of_a_text_that_lost_a_secret_are_wiped() -> None:
    redactor = Redactor()
    cleaned(observation("password=q8w7e6r5t4", turn=1), redactor)
    before, after = cleaned(action(turn=0), redactor), cleaned(action(turn=1), redactor)
    assert before == action(turn=0)
    assert is_wiped(after.prompt_delta) and len(after.prompt_delta) == 8 and after.sampled == action().sampled
    own = cleaned(action("password=q8w7e6r5t4"), redactor)
    assert is_wiped(own.sampled) and is_wiped(own.prompt_delta) and "q8w7" not in own.text
    finished = EpisodeFinished(episode_id="e", group_id="g", attempt=1, outcome="completed", worker="w")
    assert cleaned(finished, redactor) == finished


def test_values_of_secret_variables_are_known() -> None:
    known = find_environment_secrets({"OPENAI_API_KEY": "my-private-value", "HOME": "/root", "NKEY_SEED": "/run/secret"})
    assert known == ["my-private-value"]
    assert Redactor(known).clean_text("a my-private-value b") == "a [redacted] b"


def test_what_is_no_message_is_left_out_when_it_looks_like_a_secret() -> None:
    entry = StreamEntry(subject="fb.r.x", payload=b"\xc1password=q8w7e6r5t4", sequence=1, time_ns=1)
    assert b"q8w7" not in Redactor().clean(entry).payload


def test_every_word_that_names_a_secret_is_looked_at_closely() -> None:
    """The quick look must let nothing pass that the close look would take out."""
    from fleetbus.logs.setup import SECRET_WORDS

    for word in (*SECRET_WORDS, "access_token", "token", "API-KEY", "private key"):
        config = {word: "q8w7e6r5t4"}
        task = Task(key="t", config=config)
        request = EpisodeRequested(
            episode_id="e", group_id="g", sample_index=0, split="train", task=task, policy="p", deadline_ns=1
        )
        close = Redactor().clean_value("", {"config": config}) != {"config": config}
        assert (cleaned(request).task.config != config) == close
