"""A recording from elsewhere: it chooses no code, no address and no file, fills no memory, and gives no terminal a command."""

from __future__ import annotations

import io
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.config.settings import LogSettings
from fleetbus.errors import UserError
from fleetbus.log.archive_format import ArchivedEntry, encode_frame
from fleetbus.logs.setup import configure_logs
from fleetbus.recording import RecordingHeader, load_recording
from fleetbus.recording.format import RecordingDamaged, RecordingTooLarge, encode_part, encode_start
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, PolicyPublished, Subjects, Task, encode
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.replay.fixtures import replay_blocking

SUBJECTS = Subjects("theirs")
MARK = "was_here"
FOREIGN = "/tmp/x;id"


def build_recording(file: Path, messages: list[tuple[str, Any]], **configuration: dict[str, Any]) -> Path:
    with create_recording(file, RecordingHeader(run="theirs", configuration=configuration)) as writer:
        entries = [
            StreamEntry(sequence=number, time_ns=number, subject=subject, payload=encode(message, subject=subject))
            for number, (subject, message) in enumerate(messages, 1)
        ]
        writer.add(entries)
    return file


def request(key: str = "k") -> EpisodeRequested:
    return EpisodeRequested(
        episode_id="e1",
        group_id="g1",
        sample_index=0,
        split="train",
        task=Task(key=key, env="", prompt="p"),
        policy="default",
        max_turns=1,
        max_tokens=1,
        deadline_ns=1 << 62,
    )


@pytest.fixture
def inviting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that leaves a mark when it is imported."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / MARK)!r}, 'w').close()\nclass Environment: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "spec",
    [
        f"stdio:{sys.executable} evil.py",
        f"stdio+reset=x:{sys.executable} evil.py",
        f"process:openenv:{sys.executable} evil.py",
        "evil:Environment",
        "pool:evil:Environment",
        "mcp:evil:Environment",
        "gym:evil:Env-v0",
        "http://127.0.0.1:9/mcp",
        "openenv:http://127.0.0.1:9",
        "remote-gym:http://127.0.0.1:9",
        "docker:openenv:evil",
        "fleet:http://127.0.0.1:9",
        f"warehouse\nother=stdio:{sys.executable} evil.py",
    ],
)
def test_a_recording_runs_no_code_and_calls_no_address_that_its_header_names(inviting: Path, spec: str) -> None:
    file = build_recording(inviting / "a.fbrec", [(SUBJECTS.task("default", "e1"), request())], run={"environment": spec})
    with pytest.raises(UserError, match="--environment"):
        replay_blocking(file)
    assert not (inviting / MARK).exists()


def test_the_key_of_this_machine_goes_to_no_server_that_a_recording_names(
    inviting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine-and-nobody-elses")
    engine = {"engine": "openai", "urls": "http://127.0.0.1:9"}
    file = build_recording(inviting / "a.fbrec", [(SUBJECTS.task("default", "e1"), request())], inference=engine)
    with pytest.raises(UserError, match="engine openai"):
        replay_blocking(file, role="inference")


def test_a_model_folder_is_named_by_who_replays(inviting: Path) -> None:
    entries = [(SUBJECTS.task("default", "e1"), request())]
    file = build_recording(inviting / "a.fbrec", entries, run={"model": str(inviting)})
    with pytest.raises(UserError, match="--model"):
        replay_blocking(file, role="inference")


def test_every_setting_that_is_free_text_is_refused_unless_it_is_listed(tmp_path: Path) -> None:
    from fleetbus.config.fields import tables
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.replay.options import read_configuration
    from fleetbus_workers.replay.recorded_choices import restrict_recorded_choices

    hostile = {
        table: {key: FOREIGN for key in settings if isinstance(getattr(getattr(Configuration(), table), key), str)}
        for table, settings in tables().items()
    }
    for table, values in hostile.items():
        for key in list(values):
            try:
                msgspec.convert({table: {key: FOREIGN}}, Configuration)
            except msgspec.ValidationError:
                del values[key]  # one of a fixed list
    hostile["run"]["environment"] = "warehouse"
    file = build_recording(tmp_path / "a.fbrec", [(SUBJECTS.task("default", "e1"), request())], **hostile)
    recording = load_recording(file)
    taken = restrict_recorded_choices(read_configuration(recording), recording, role="environment", environment=None)
    names = [(table, key) for table in hostile for key in hostile[table]]
    assert len(names) > 10
    assert [each for each in names if getattr(getattr(taken, each[0]), each[1]) == FOREIGN] == []


@pytest.mark.parametrize("trusted", [True, False])
async def test_the_settings_of_a_recorded_lineage_are_restricted_as_those_of_the_header(tmp_path: Path, trusted: bool) -> None:
    from fleetbus_schemas import LineageStarted
    from fleetbus_workers.replay.driver import ReplayContext
    from fleetbus_workers.replay.learner_replay import configure_lineage
    from fleetbus_workers.replay.options import Replay
    from fleetbus_workers.replay.recorded_lineages import read_lineages

    settings: dict[str, dict[str, bool | int | float | str]] = {
        "learner": {"archive": FOREIGN, "restart_from": "start/2"},
    }
    started = LineageStarted(lineage="l1", worker="w", settings=settings)
    file = build_recording(tmp_path / "a.fbrec", [(SUBJECTS.train("default"), started)])
    context = ReplayContext(load_recording(file), Replay(role="learner", trusted=trusted))
    (lineage,) = read_lineages(context.recording)
    taken = configure_lineage(context, context.configuration, lineage, tmp_path, trains=True)
    assert (taken.learner.archive == FOREIGN) == trusted
    assert taken.learner.restart_from == "start/2"
    lineage.started = msgspec.structs.replace(started, settings={"trainer": {"device": FOREIGN}})
    with pytest.raises(UserError, match=r"\$\.device"):
        configure_lineage(context, context.configuration, lineage, tmp_path, trains=trusted)


def test_numbers_of_a_recording_are_bounded(tmp_path: Path) -> None:
    from fleetbus_workers.replay.options import read_configuration
    from fleetbus_workers.replay.recorded_choices import restrict_recorded_choices

    file = build_recording(
        tmp_path / "a.fbrec",
        [(SUBJECTS.task("default", "e1"), request())],
        inference={"max_num_seqs": 10**9, "threads": 10**6, "slots": 10**9},
    )
    recording = load_recording(file)
    taken = restrict_recorded_choices(read_configuration(recording), recording, role="inference", environment=None).inference
    assert taken.max_num_seqs <= 1024 and taken.threads <= 1024 and taken.slots <= 4096


def test_no_file_of_this_user_is_copied_because_a_recording_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "id_ed25519"
    secret.write_text("PRIVATE")
    (tmp_path / "l1-v000001.safetensors").write_text("PRIVATE weights")
    named = [
        PolicyPublished(
            policy="default", version=number, lineage="l1", step=number, uri=path.as_uri(), manifest=(), size_bytes=1
        )
        for number, path in enumerate((secret, tmp_path / "l1-v000001.safetensors"))
    ]
    build_recording(tmp_path / "a.fbrec", [(SUBJECTS.policy("default"), message) for message in named])
    assert run_program(["record", "a.fbrec", "-o", "b.fbrec", "--weights", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_files"] == 0
    assert load_recording(tmp_path / "b.fbrec").files == {}
    assert b"PRIVATE" not in (tmp_path / "b.fbrec").read_bytes()


@pytest.mark.parametrize("run", ["../../etc", "a/b", "", "a.b", "*", ">", "x" * 129, "a\n"])
def test_the_run_of_a_recording_is_no_path(tmp_path: Path, run: str) -> None:
    (tmp_path / "a.fbrec").write_bytes(encode_start(RecordingHeader(run=run)))
    with pytest.raises(RecordingDamaged):
        load_recording(tmp_path / "a.fbrec")


@pytest.mark.parametrize("subject", ["fb.other.act.e0.e1", "fb.theirs", "$JS.API.STREAM.DELETE.x", "", "fb.theirs."])
def test_entries_of_another_run_or_of_none_are_refused(tmp_path: Path, subject: str) -> None:
    part = [ArchivedEntry(1, 1, subject, b"")]
    (tmp_path / "a.fbrec").write_bytes(encode_start(RecordingHeader(run="theirs")) + encode_part(part))
    with pytest.raises(RecordingDamaged):
        load_recording(tmp_path / "a.fbrec")


@pytest.mark.integration
def test_a_small_file_does_not_expand_past_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "bomb.fbrec"
    entry = ArchivedEntry(1, 1, "fb.theirs.act.e0.e1", bytes(1 << 20))
    frame = encode_part([entry] * 60)
    with file.open("wb") as out:
        out.write(encode_start(RecordingHeader(run="theirs")))
        for _ in range(40):
            out.write(frame)
    size = file.stat().st_size
    assert size < 12 << 20
    loaded = 0
    from fleetbus.recording import RecordingReader

    with pytest.raises(RecordingTooLarge):
        for each in RecordingReader(file).entries():
            loaded += len(each.payload)
    assert loaded <= (64 << 20) + 32 * size < 450 << 20


def test_millions_of_empty_entries_are_counted_before_they_are_made(tmp_path: Path) -> None:
    item = msgspec.msgpack.encode(ArchivedEntry(1, 1, "", b""))
    count = 4_000_000
    content = b"\xdd" + count.to_bytes(4, "big") + item * count
    frame = encode_frame(b"E" + zlib.compress(content))
    (tmp_path / "a.fbrec").write_bytes(encode_start(RecordingHeader(run="theirs")) + frame)
    with pytest.raises(RecordingTooLarge):
        load_recording(tmp_path / "a.fbrec")


HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202egnp.exe\rfleetbus: all is well\x08"
OBEYED = set("\x1b\x07\x08\r\x9b\u202e")


@pytest.mark.parametrize("arguments", [[], ["e1"], ["e1", "--tokens"], ["--json"], ["e1", "--json"]])
def test_a_terminal_is_shown_control_characters_and_not_given_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    finished = EpisodeFinished(
        episode_id="e1",
        group_id="g1",
        attempt=1,
        worker="w",
        task_key=HOSTILE,
        outcome="env_failed",
        error_class=HOSTILE,
        error=HOSTILE,
        reward=None,
        turns=0,
        tokens=0,
    )
    build_recording(
        tmp_path / "a.fbrec", [(SUBJECTS.task("default", "e1"), request(HOSTILE)), (SUBJECTS.episode("e1"), finished)]
    )
    assert run_program(["episodes", "a.fbrec", *arguments]) == 0
    printed = capsys.readouterr()
    assert not OBEYED & set(printed.out + printed.err)
    assert "gnp.exe" in printed.out
    if "--json" in arguments:
        facts = json.loads(printed.out)
        shown = facts["request"]["task"]["key"] if "e1" in arguments else facts[0]["task_key"]
        assert shown == HOSTILE


def test_an_error_line_gives_no_command_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["episodes", f"x{HOSTILE}.fbrec"]) == 2
    assert not OBEYED & set(capsys.readouterr().err)


def test_a_log_line_holds_no_command_and_is_one_line() -> None:
    import structlog

    stream = io.StringIO()
    configure_logs(LogSettings(), stream=stream)
    structlog.get_logger().warning("episode failed", error=f"{HOSTILE}\n2026-01-01 [info] all is well", nested={"a": [HOSTILE]})
    assert not OBEYED & set(stream.getvalue()) and stream.getvalue().count("\n") == 1
