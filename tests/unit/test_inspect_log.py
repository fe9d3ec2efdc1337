"""Episodes as a log of Inspect and back: one JSON file per sample in a zip, and what is no such log is refused in one line."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fleetbus.interchange import eval_file
from fleetbus_workers.api.reader import open_run
from fleetbus_workers.cli.program import run_program
from tests.support.interchange_run import ExchangeRun, list_answers, write_run

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "attachment://abc"}, {"type": "image", "image": "data:"}]},
    {
        "role": "assistant", "content": [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "I look."}],
        "tool_calls": [{"id": "c1", "function": "look", "arguments": {"at": 1}, "type": "function"}],
    },
    {"role": "tool", "content": "17", "tool_call_id": "c1", "function": "look"},
    {"role": "assistant", "content": "17"},
]  # fmt: skip
SAMPLE: dict[str, Any] = {
    "id": 5, "epoch": 2, "input": "How many?", "target": "17", "messages": MESSAGES, "attachments": {"abc": "How many?"},
    "scores": {"match": {"value": "C"}, "length": {"value": 0.25}},
}  # fmt: skip


def export(folder: Path) -> Path:
    recording = write_run(folder / "run.fbrec")
    assert run_program(["episodes", str(recording), "--format", "eval", "--output", str(folder / "run.eval")]) == 0
    return recording


def write_log(file: Path, *samples: Any, method: int = zipfile.ZIP_DEFLATED, header: bool = True) -> Path:
    with zipfile.ZipFile(file, "w", method) as archive:
        if header:
            archive.writestr("header.json", "{}")
        for number, sample in enumerate(samples):
            archive.writestr(f"samples/{number}_epoch_1.json", sample if isinstance(sample, bytes) else json.dumps(sample))
    return file


def read_members(file: Path) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def test_the_log_has_a_sample_per_task_and_an_epoch_per_episode(tmp_path: Path) -> None:
    export(tmp_path)
    members = read_members(tmp_path / "run.eval")
    header, summaries = members["header.json"], members["summaries.json"]
    assert (header["version"], header["status"], header["eval"]["model"]) == (2, "success", "fleetbus/default")
    assert [(each["id"], each["epoch"], each["uuid"]) for each in summaries] == [
        ("task/one", 1, "plain"), ("task-1", 1, "tree"), ("task-1", 2, "pictures"), ("task-1", 3, "failed"),
        ("task-1", 4, "game"), ("task-1", 5, "unfinished"),
    ]  # fmt: skip
    assert sorted(name for name in members if name.startswith("samples/")) == sorted(
        f"samples/{each['id']}_epoch_{each['epoch']}.json" for each in summaries
    )
    score = header["results"]["scores"][0]
    assert (score["scored_samples"], score["unscored_samples"]) == (4, 2)
    assert score["metrics"]["mean"]["value"] == pytest.approx((1.0 + 0.25 + 0.0 + 0.25) / 4)
    assert header["stats"]["model_usage"]["fleetbus/default"]["output_tokens"] == 17 * 3


def test_a_sample_has_the_conversation_the_score_and_why_there_is_none(tmp_path: Path) -> None:
    export(tmp_path)
    members = read_members(tmp_path / "run.eval")
    plain = members["samples/task/one_epoch_1.json"]
    assert [message["role"] for message in plain["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "user", "assistant", "user"
    ]  # fmt: skip
    assert plain["messages"][2]["tool_calls"][0] == {
        "id": "call-7", "function": "look", "arguments": {"what": "a"}, "type": "function"
    }  # fmt: skip
    assert {name: score["value"] for name, score in plain["scores"].items()} == {"reward": 1.0, "verifier": 1.0, "judge": 0.5}
    assert plain["metadata"]["outcome"] == "completed" and plain["total_time"] == 8.0
    assert members["samples/task-1_epoch_1.json"]["limit"]["type"] == "token"
    failed = members["samples/task-1_epoch_3.json"]
    assert failed["error"]["message"] == "env_failed: open_failed: no desk" and "scores" not in failed


def read_shown(sample: dict[str, Any]) -> list[list[str]]:
    """Of each call of the model what it was shown, out of the pool."""
    pool = [message["content"] for message in sample["events_data"]["messages"]]
    calls = [event["input_refs"] for event in sample["events"] if event["event"] == "model"]
    return [[text for start, end in refs for text in pool[start:end]] for refs in calls]


def test_the_events_are_the_calls_of_model_and_tools_with_what_came_back_and_the_scores(tmp_path: Path) -> None:
    export(tmp_path)
    members = read_members(tmp_path / "run.eval")
    plain = members["samples/task/one_epoch_1.json"]
    assert [event["event"] for event in plain["events"]] == ["model", "tool", "model", "tool", "model", *["score"] * 3]
    first, looked, _, unnamed, last, score = plain["events"][:6]
    assert (looked["id"], looked["result"], looked["message_id"]) == ("call-7", "17", "3")
    assert (unnamed["id"], unnamed["result"]) == ("turn-1-0", "18"), "in order where the protocol has no ids"
    assert first["tools"][0]["parameters"]["properties"] == {"what": {"type": "string"}}
    assert last["output"]["choices"][0]["stop_reason"] == "max_tokens" and "metadata" not in plain["events_data"]["messages"][2]
    assert (score["scorer"], score["score"]["value"], score["working_start"]) == ("reward", 1.0, plain["total_time"])
    assert looked["completed"] >= looked["timestamp"] >= first["completed"]
    assert [event["event"] for event in members["samples/task-1_epoch_3.json"]["events"]] == ["error"]


def test_a_call_of_the_model_has_what_its_segment_holds(tmp_path: Path) -> None:
    export(tmp_path)
    members = read_members(tmp_path / "run.eval")
    tree = read_shown(members["samples/task-1_epoch_1.json"])
    assert tree[1] == ["Be brief.", "Find it.", "answer 0", "And?"]
    assert tree[2] == ["Be brief.", "Find it.", "Summed up."], "the context that was dropped is not there"
    assert tree[3] == ["You help.", "Help."], "of a sub-agent its own conversation"
    assert tree[5][-2:] == ["answer 1", "Again."], "the first segment goes on"


def test_an_import_gives_the_ids_and_the_segments_back(tmp_path: Path) -> None:
    recording = export(tmp_path)
    assert run_program(["import", str(tmp_path / "run.eval"), "-o", str(tmp_path / "back.fbrec")]) == 0
    assert list_answers(tmp_path / "back.fbrec") == list_answers(recording)
    before, after = ({each.request.episode_id: each for each in open_run(file).transcripts() if each.request} for file in
                     (recording, tmp_path / "back.fbrec"))  # fmt: skip
    for name in ("plain", "tree", "failed", "game"):
        one, other = before[name], after[name]
        assert [turn.seat for turn in one.turns] == [turn.seat for turn in other.turns]
        assert [(turn.messages, turn.tools) for turn in one.turns] == [(turn.messages, turn.tools) for turn in other.turns]
        assert [turn.action and (turn.action.tool_calls, turn.action.origin, turn.action.versions) for turn in one.turns] == [
            turn.action and (turn.action.tool_calls, turn.action.origin, turn.action.versions) for turn in other.turns
        ]
        assert one.result is not None and other.result is not None
        for field in ("outcome", "reward", "segments", "untrained", "loss_mask", "last_observation", "error_class", "seats"):
            assert getattr(one.result, field) == getattr(other.result, field)
    assert after["unfinished"].result is None


@pytest.mark.parametrize(("score", "reward"), [("", 1.0), ("match", 1.0), ("length", 0.25)])
def test_another_tools_log_is_read_as_text_with_a_score(tmp_path: Path, score: str, reward: float) -> None:
    file = write_log(tmp_path / "a.eval", SAMPLE)
    assert run_program(["import", str(file), "-o", str(tmp_path / "a.fbrec"), "--score", score, "--split", "eval"]) == 0
    (transcript,) = open_run(tmp_path / "a.fbrec").transcripts()
    result = transcript.result
    assert result is not None and (result.task_key, result.reward, result.split) == ("5", reward, "eval")
    shown = [(message.role, message.content, message.tool_call_id) for turn in transcript.turns for message in turn.messages]
    assert shown == [("system", "Be brief.", ""), ("user", "How many?\n[image]", ""), ("tool", "17", "c1")]
    assert [turn.action.text for turn in transcript.turns if turn.action] == ["I look.", "17"]
    assert "without token ids" in result.note


@pytest.mark.parametrize(
    ("changes", "outcome", "reward"),
    [
        ({"scores": None}, "verifier_unknown", None),
        ({"scores": {"a": {"value": [1, 2]}}}, "verifier_unknown", None),
        ({"scores": {"a": {"value": 10**400}}}, "verifier_unknown", None),
        ({"scores": {"a": {"value": True}}}, "completed", 1.0),
        ({"error": {"message": "broke"}}, "env_failed", None),
        ({"limit": {"type": "token", "limit": 5}}, "truncated", 1.0),
    ],
)
def test_outcomes_are_those_of_the_sample(tmp_path: Path, changes: dict[str, Any], outcome: str, reward: float | None) -> None:
    file = write_log(tmp_path / "a.eval", SAMPLE | changes)
    assert run_program(["import", str(file), "-o", str(tmp_path / "a.fbrec")]) == 0
    (transcript,) = open_run(tmp_path / "a.fbrec").transcripts()
    assert transcript.result is not None and (transcript.result.outcome, transcript.result.reward) == (outcome, reward)


@pytest.mark.parametrize(
    ("samples", "options", "says"),
    [
        ([b"{"], [], "is no JSON"),
        ([b"[]"], [], "is no sample"),
        ([{"id": 1, "messages": [{"role": "dog"}]}], [], "is no sample of Inspect"),
        ([{"id": "X", "store": [[]] * 9}], [], "has more than 12 values"),
        ([SAMPLE], ["--score", "other"], "has no score other: its scores are length, match"),
        ([], [], "there is no episode in it"),
        ([{"id": 1, "messages": [{"role": "assistant", "metadata": {"fleetbus": {"turn": 0, "origin": 5}}}]}], [], "turn 0"),
        ([SAMPLE], ["--run", "no name"], "run 'no name' must be"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    samples: list[Any],
    options: list[str],
    says: str,
) -> None:
    if "12 values" in says:
        monkeypatch.setattr(eval_file, "MAX_VALUES", 12)
    file = write_log(tmp_path / "a.eval", *samples)
    assert run_program(["import", str(file), "-o", str(tmp_path / "a.fbrec"), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
    assert not (tmp_path / "a.fbrec").exists()


@pytest.mark.parametrize("key", ["../../up", "/root", "a/../../b", "..", "a\\..\\b", "\x1b[31m/."])
def test_no_name_of_a_sample_leads_out_of_its_folder(tmp_path: Path, key: str) -> None:
    run = ExchangeRun()
    run.play("a", [{}], task_key=key)
    recording = write_run(tmp_path / "run.fbrec", run)
    assert run_program(["episodes", str(recording), "--format", "eval", "--output", str(tmp_path / "run.eval")]) == 0

    (name,) = (each for each in read_members(tmp_path / "run.eval") if each.startswith("samples/"))
    assert name.isprintable() and not {"", ".", ".."} & set(name.split("/")) and "\\" not in name


def test_a_failed_import_leaves_what_was_there(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "a.eval", SAMPLE).read_bytes()
    assert run_program(["import", str(tmp_path / "a.eval"), "-o", str(tmp_path / "a.eval"), "--force", "--score", "other"]) == 2
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.eval", whole)]

    assert run_program(["import", str(tmp_path / "a.eval"), "-o", str(tmp_path / "a.eval"), "--force"]) == 0

    assert len(list(tmp_path.iterdir())) == len(list(open_run(tmp_path / "a.eval").transcripts())) == 1


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "a.json")
    assert run_program(["import", str(tmp_path), "-o", str(tmp_path / "a.fbrec")]) == 2
    assert "has no trajectories" in capsys.readouterr().err


@pytest.mark.parametrize("reward", [1e200, 1.7e308, -1.7e308])
def test_rewards_of_any_size_have_a_mean(tmp_path: Path, reward: float) -> None:
    run = ExchangeRun()
    for name in ("a", "b", "c"):
        run.play(name, [{}], reward=reward, timings={"step": 1.7e308, "verify": 1.7e308})
    recording = write_run(tmp_path / "run.fbrec", run)
    assert run_program(["episodes", str(recording), "--format", "eval", "--output", str(tmp_path / "run.eval")]) == 0
    assert run_program(["diagnose", str(recording)]) == run_program(["usage", str(recording)]) == 0


def test_damaged_and_foreign_archives_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_log(tmp_path / "whole.eval", SAMPLE).read_bytes()
    (tmp_path / "torn.eval").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.eval").write_bytes(whole[:60] + bytes(each ^ 255 for each in whole[60:200]) + whole[200:])
    write_log(tmp_path / "other.eval", SAMPLE, header=False)
    zstandard = bytearray(write_log(tmp_path / "stored.eval", SAMPLE, method=zipfile.ZIP_STORED).read_bytes())
    for place in [at for at in range(len(zstandard) - 4) if zstandard[at : at + 4] == b"PK\x01\x02"]:
        zstandard[place + 10] = 93
    (tmp_path / "zstandard.eval").write_bytes(zstandard)
    packed = write_log(tmp_path / "packed.eval", SAMPLE, method=zipfile.ZIP_LZMA).read_bytes()
    (tmp_path / "lzma.eval").write_bytes(packed[:160] + bytes(each ^ 255 for each in packed[160:200]) + packed[200:])
    for name in ("torn", "flipped", "other", "zstandard", "lzma", "missing"):
        assert run_program(["import", str(tmp_path / f"{name}.eval"), "-o", str(tmp_path / "a.fbrec")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert not (tmp_path / "a.fbrec").exists()
