"""``fleetbus record``, ``episodes``, ``replay`` and ``runs`` as a user types them, against a real server where there is one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.bus.streams import plan_run
from fleetbus.recording import load_recording
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import PolicyPublished, Subjects, encode
from fleetbus_workers.cli.program import run_program
from tests.support.log_builder import read_entries
from tests.support.processes import wait_for_output
from tests.support.servers import connect
from tests.unit.test_archive_retention import build_run

HERE = Path(__file__).parents[1] / "replay"
GUESSING = HERE / "recordings" / "guessing.fbrec"
RUN = "small"

LIMIT_SECONDS = 100

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the recorded run in its log."""
    from anyio.from_thread import start_blocking_portal

    from fleetbus.bus.nats.server import run_server

    store = tmp_path_factory.mktemp("recorded")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(store)) as running:
        portal.call(fill, running.url)
        yield running.url


async def fill(url: str, start: int = 0) -> None:
    async with connect(url, run=RUN, role="test") as bus:
        await bus.declare(plan_run(RUN, lanes=2, max_bytes=0))
        for entry in load_recording(GUESSING).entries[start:]:
            await bus.publish(entry.subject, entry.payload)


def read_stdout(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Standard output of a command that ends with this exit code."""
    capsys.readouterr()
    found = run_program(arguments)
    captured = capsys.readouterr()
    assert found == code, captured
    assert code != 2 or captured.err.count("\n") == 1, "bad input is one line"
    return captured.out if code != 2 else captured.err


@pytest.mark.parametrize("arguments", [(), ("l1-start-0000",), ("--outcome", "open")])
def test_json_is_all_that_standard_output_has_whatever_the_log_has(
    tmp_path: Path, capsys: Any, arguments: tuple[str, ...]
) -> None:
    file, original = tmp_path / "odd.fbrec", load_recording(GUESSING)
    with create_recording(file, original.header) as recording:
        recording.add(
            [
                msgspec.structs.replace(each, payload=b"odd") if "start-0000" in each.subject else each
                for each in original.entries
            ]
        )
    assert json.loads(read_stdout(capsys, "episodes", str(file), *arguments, "--json")) is not None


def test_the_log_of_a_run_is_recorded_whole(server: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "run.fbrec"
    facts = json.loads(read_stdout(capsys, "record", RUN, "--nats", server, "-o", str(file), "--json"))
    original, copy = load_recording(GUESSING), load_recording(file)
    assert facts["entries"] == len(original.entries) == len(copy.entries) and copy.torn == ""
    assert [(entry.subject, entry.payload) for entry in copy.entries] == [
        (entry.subject, entry.payload) for entry in original.entries
    ]
    assert "exists already" in read_stdout(capsys, "record", RUN, "--nats", server, "-o", str(file), code=2)


async def fill_pictures(url: str, folder: Path) -> None:
    """An observation that names two images, of which the bucket has one."""
    import hashlib

    from fleetbus.bus.objects import weights_bucket
    from fleetbus_schemas import ChatMessage, Image, Observation

    file = folder / "picture"
    file.write_bytes(b"a picture")
    names = [hashlib.sha256(content).hexdigest() for content in (b"a picture", b"one that is gone")]
    observation = Observation(
        episode_id="e",
        attempt=1,
        turn=0,
        policy="default",
        messages=(ChatMessage(role="user", content=tuple(Image(object=name) for name in names)),),
        tokens_left=9,
        environment_lane="e0",
        deadline_ns=1,
    )
    async with connect(url, run="pictures", role="test") as bus:
        await bus.declare(plan_run("pictures", lanes=1, max_bytes=0))
        await bus.objects(weights_bucket("pictures")).put(names[0], file)
        await bus.publish(Subjects("pictures").observation("default", "any", "e"), encode(observation))


def test_images_of_the_run_s_bucket_are_recorded_and_nobody_claims_to_have_looked_at_them(
    server: str, tmp_path: Path, capsys: Any
) -> None:
    anyio.run(fill_pictures, server, tmp_path)
    file = tmp_path / "pictures.fbrec"
    assert run_program(["record", "pictures", "--nats", server, "-o", str(file)]) == 0
    captured = capsys.readouterr()
    assert "1 objects of 0.0 MB" in captured.out
    assert "1 objects are in no bucket any more" in captured.err and "images in it were not checked for secrets" in captured.err
    assert list(load_recording(file).objects.values()) == [b"a picture"]
    without = ["record", "pictures", "--nats", server, "-o", str(file), "--force", "--no-objects", "--json"]
    assert json.loads(read_stdout(capsys, *without))["objects"] == {
        **dict.fromkeys(("objects", "bytes", "missing", "withheld", "beyond"), 0),
        "named": 2,
    }


def test_one_episode_is_cut_out_of_a_recording(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "one.fbrec"
    read_stdout(capsys, "record", str(GUESSING), "-o", str(file), "--episode", "g000001-2")
    recording = load_recording(file)
    assert recording.header.selected == ("g000001-2",)
    assert {entry.subject.split(".")[2] for entry in recording.entries} == {"task", "obs", "act", "episode", "policy"}
    listed = json.loads(read_stdout(capsys, "episodes", str(file), "--json"))
    assert [row["episode_id"] for row in listed] == ["g000001-2"]


def test_a_run_without_a_log_is_refused_and_leaves_no_file(server: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "no.fbrec"
    assert "no-such-run" in read_stdout(capsys, "record", "no-such-run", "--nats", server, "-o", str(file), code=2)
    assert not file.exists()


@pytest.mark.integration
def test_a_log_is_followed_until_sigterm_and_what_it_names_by_then_is_added(server: str, tmp_path: Path) -> None:
    file, run = tmp_path / "live.fbrec", "followed"
    weights = tmp_path / "l1-v000001.safetensors"
    weights.write_bytes(b"some weights")
    version = encode(
        PolicyPublished(policy="default", version=1, lineage="l1", step=1, uri=weights.as_uri(), manifest=(), size_bytes=12)
    )
    subjects = Subjects(run)

    async def scenario() -> None:
        async with connect(server, run=run, role="test") as bus:
            await bus.declare(plan_run(run, lanes=1, max_bytes=0))
            await bus.publish(subjects.episode("before"), b"x")
            command = [
                sys.executable,
                "-m",
                "fleetbus_workers.cli",
                "record",
                run,
                "--nats",
                server,
                "--follow",
                "-o",
                str(file),
            ]
            command += ["--weights"]
            process = await anyio.open_process(command, stderr=subprocess.PIPE)
            try:
                with anyio.fail_after(LIMIT_SECONDS):
                    await wait_for_output(process.stderr, b"recording new entries")
                    await bus.publish(subjects.episode("after"), b"y")
                    await bus.publish(subjects.policy("default"), version)
                    while len(load_recording(file).entries) < 3:  # noqa: ASYNC110
                        await anyio.sleep(0.1)
                    assert "no end" in load_recording(file).torn
                    process.send_signal(signal.SIGTERM)
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                await process.aclose()

    anyio.run(scenario)
    recording = load_recording(file)
    assert [entry.payload for entry in recording.entries] == [b"x", b"y", version] and recording.torn == ""
    assert recording.files == {weights.name: b"some weights"}


def test_secrets_of_the_environment_do_not_reach_the_file(
    server: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file, kept = "secretive", tmp_path / "a.fbrec", tmp_path / "b.fbrec"
    monkeypatch.setenv("MY_SERVICE_TOKEN", "very-private-value")

    async def prepare() -> None:
        from fleetbus_schemas import Task
        from fleetbus_schemas.episode import EpisodeRequested

        async with connect(server, run=run, role="test") as bus:
            await bus.declare(plan_run(run, lanes=1, max_bytes=0))
            task = Task(key="t", prompt="say very-private-value", env_variables={"password": "another-private-value"})
            request = EpisodeRequested(
                episode_id="e", group_id="g", sample_index=0, split="train", task=task, policy="default", deadline_ns=1
            )
            await bus.publish(Subjects(run).task("default", "e"), encode(request))

    anyio.run(prepare)
    facts = json.loads(read_stdout(capsys, "record", run, "--nats", server, "-o", str(file), "--json"))
    payload = load_recording(file).entries[0].payload
    assert facts["redacted_entries"] == 1 and load_recording(file).header.redacted
    assert b"private-value" not in payload and payload.count(b"[redacted]") == 2
    read_stdout(capsys, "record", run, "--nats", server, "-o", str(kept), "--keep-secrets")
    assert b"very-private-value" in load_recording(kept).entries[0].payload and not load_recording(kept).header.redacted


def test_an_archive_is_recorded_alone(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetbus.log.archive_writer import open_archive

    monkeypatch.chdir(tmp_path)
    entries = load_recording(GUESSING).entries
    with open_archive(tmp_path / "archive", RUN) as archive:
        archive.append(entries)
    read_stdout(capsys, "record", RUN, "--archive", str(tmp_path / "archive"), "-o", "out.fbrec")
    assert load_recording(tmp_path / "out.fbrec").entries == entries
    wrong = read_stdout(capsys, "record", "other", "--archive", str(tmp_path / "archive"), "-o", "wrong.fbrec", code=2)
    assert "archive of run small" in wrong and not (tmp_path / "wrong.fbrec").exists()
    assert "differs in" in read_stdout(capsys, "replay", "out.fbrec", "--environment", "scripted", code=1)


def test_episodes_are_listed_and_filtered(server: str, capsys: Any) -> None:
    rows = json.loads(read_stdout(capsys, "episodes", RUN, "--nats", server, "--json", "--limit", "0"))
    assert len(rows) == 33 and {row["outcome"] for row in rows} <= {"completed", "truncated"}
    best = json.loads(read_stdout(capsys, "episodes", str(GUESSING), "--min-reward", "1", "--split", "train", "--json"))
    assert best and all(row["reward"] == 1 and row["split"] == "train" for row in best)
    assert json.loads(read_stdout(capsys, "episodes", str(GUESSING), "--outcome", "open", "--json")) == []
    assert "one of open, completed" in read_stdout(capsys, "episodes", str(GUESSING), "--outcome", "complete", code=2)
    table = read_stdout(capsys, "episodes", str(GUESSING), "--limit", "2")
    assert "33 of 33 episodes, the last 2 shown" in table
    assert len(table.splitlines()) == 4, "away from a terminal a row is a line, however long its task's name is"


def test_a_transcript_shows_text_and_on_request_tokens(capsys: Any) -> None:
    shown = read_stdout(capsys, "episodes", str(GUESSING), "g000000-0", "--tokens")
    assert "── turn 0" in shown and "── turn 1" in shown and "worth" in shown and "result: completed" in shown
    assert "prompt tokens: [" in shown and "sampled tokens, version 0" in shown
    facts = json.loads(read_stdout(capsys, "episodes", str(GUESSING), "g000000-0", "--tokens", "--json"))
    action = facts["turns"][0]["action"]
    assert len(action["sampled"]) == len(action["logprobs"]) > 0
    assert "there is no episode nobody" in read_stdout(capsys, "episodes", str(GUESSING), "nobody", code=2)


def test_a_torn_recording_is_shown_as_far_as_it_goes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "torn.fbrec"
    file.write_bytes(GUESSING.read_bytes()[:-40])
    capsys.readouterr()
    assert run_program(["episodes", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 33 and "torn.fbrec" in captured.err


def test_a_torn_recording_is_copied_as_far_as_it_goes_and_the_copy_is_torn_too(tmp_path: Path, capsys: Any) -> None:
    file, copy = tmp_path / "torn.fbrec", tmp_path / "copy.fbrec"
    file.write_bytes(GUESSING.read_bytes()[:-40])
    facts = json.loads(read_stdout(capsys, "record", str(file), "-o", str(copy), "--json", code=1))
    assert "torn.fbrec is damaged" in facts["problems"][0]
    assert "has no end" in load_recording(copy).torn
    assert load_recording(copy).entries == load_recording(file).entries


@pytest.mark.integration
@pytest.mark.parametrize("options", [(), ("--json", "--only-needed")], ids=["", "needed"])
def test_a_torn_recording_is_restored_as_far_as_it_goes_and_that_is_said(
    server: str, tmp_path: Path, capsys: Any, options: tuple[str, ...]
) -> None:
    file = tmp_path / "torn.fbrec"
    with create_recording(file, RecordingHeader(run="run", redacted=False)) as recording:
        recording.add(read_entries(build_run()))
    file.write_bytes(file.read_bytes()[:-1])
    run = f"torn{len(options)}"
    assert run_program(["restore", str(file), "--run", run, "--nats", server, *options]) == 1
    assert "torn.fbrec is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["episodes"], ["audit"], ["replay", "--role", "learner"]])
def test_a_pipe_is_no_recording_and_not_waited_for(tmp_path: Path, capsys: Any, command: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe.fbrec")
    assert run_program([*command, str(tmp_path / "pipe.fbrec")]) == 2
    assert "is a pipe, and a recording is read more than once" in capsys.readouterr().err


def test_replay_ends_with_0_where_nothing_changed_and_with_1_where_something_did(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = (HERE / "guessing.py").read_text()
    (tmp_path / "guessing_now.py").write_text(original)
    (tmp_path / "guessing_then.py").write_text(original.replace("worth {worth}", "worth: {worth}"))
    monkeypatch.chdir(tmp_path)
    same = read_stdout(capsys, "replay", str(GUESSING), "--environment", "guessing_now:Guessing")
    assert "replays as recorded" in same
    changed = read_stdout(capsys, "replay", str(GUESSING), "--environment", "guessing_then:Guessing", code=1)
    assert "differs in messages[0].content" in changed
    report = json.loads(
        read_stdout(capsys, "replay", str(GUESSING), "--environment", "guessing_then:Guessing", "--json", code=1)
    )
    assert report["same"] is False and report["first"]["field"] == "messages[0].content"
    ignored = ("--ignore", "Observation.messages.content", "--environment", "guessing_then:Guessing")
    assert "replays as recorded" in read_stdout(capsys, "replay", str(GUESSING), *ignored)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--speed", "fast"), "--speed fast"),
        (("--environment", "nothing:here"), "nothing"),
        (("--role", "inference", "--model", "not-a-folder"), "not-a-folder"),
        (("--role", "learner", "--jobs", "2"), "--jobs"),
    ],
)
def test_bad_input_to_replay_is_one_line(arguments: tuple[str, ...], reason: str, capsys: Any) -> None:
    pytest.importorskip("torch")
    assert reason in read_stdout(capsys, "replay", str(GUESSING), *arguments, code=2)


def test_the_report_says_how_far_the_check_of_a_learner_went(capsys: Any) -> None:
    command = ("replay", str(GUESSING), "--role", "learner", "--until", "batches")
    shown = read_stdout(capsys, *command)
    assert "replays as recorded" in shown and "not checked: loss, gradients, weights" in shown
    report = json.loads(read_stdout(capsys, *command, "--json"))
    assert report["same"] is True and "not checked" in report["checked"]


def test_a_replay_can_go_at_a_multiple_of_the_recorded_speed(capsys: Any) -> None:
    file = HERE / "recordings" / "warehouse.fbrec"
    report = json.loads(read_stdout(capsys, "replay", str(file), "--speed", "40", "--json"))
    assert report["same"] and report["seconds"] >= 0.9 * report["recorded_seconds"] / 40


def test_runs_are_listed_and_removed(tmp_path: Path, capsys: Any) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "nats").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "two" / "summary.json").write_text('{"optimizer_steps": 7, "success_start": 0.25, "success_end": 0.75}')
    (tmp_path / "no-run").mkdir()
    rows = json.loads(read_stdout(capsys, "runs", "list", "--run-folder", str(tmp_path), "--json"))
    assert [(row["run"], row["running"], row["steps"]) for row in rows] == [("one", False, None), ("two", False, 7)]
    assert "25% → 75%" in read_stdout(capsys, "runs", "list", "--run-folder", str(tmp_path))
    assert "no run three" in read_stdout(capsys, "runs", "rm", "one", "three", "--yes", "--run-folder", str(tmp_path), code=2)
    assert (tmp_path / "one").is_dir(), "nothing half-done"
    read_stdout(capsys, "runs", "rm", "one", "--yes", "--run-folder", str(tmp_path))
    assert not (tmp_path / "one").exists() and (tmp_path / "two").is_dir()


def test_a_run_that_is_running_is_not_removed(tmp_path: Path, capsys: Any) -> None:
    import fcntl

    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "run.json").write_text("{}")
    with (tmp_path / "live" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is running" in read_stdout(capsys, "runs", "rm", "live", "--yes", "--run-folder", str(tmp_path), code=2)
    assert os.path.isdir(tmp_path / "live")
