"""Episodes as ATIF trajectories and back: ids and log-probabilities are the log's, and what is no trajectory is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.interchange.assembly import Assembler
from fleetbus.interchange.imported import ImportedEpisode
from fleetbus_schemas import EpisodeFinished, Observation
from fleetbus_schemas.tokens import pack_logprobs
from fleetbus_workers.api.reader import open_run
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.learner.rejection_sampling import select_rewarded
from tests.support.atif_rules import check_trajectory, list_exported_answers
from tests.support.interchange_run import SUBJECTS, ExchangeRun, leave, list_answers, play_game, say, write_run

FOREIGN: dict[str, Any] = {
    "schema_version": "ATIF-v1.4",
    "agent": {"name": "terminus", "version": "2", "model_name": "some/model"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "Say hello in the file."},
        {
            "step_id": 2, "source": "agent", "message": "I write it.", "reasoning_content": "Hm.", "unknown": 1,
            "tool_calls": [{"tool_call_id": "c1", "function_name": "write", "arguments": {"text": "hello"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "written"}]},
        },
        {"step_id": 3, "source": "agent", "message": "Done.", "timestamp": "2026-11-01T10:00:00Z"},
    ],
}  # fmt: skip
TOKENS = ([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7])


def write_foreign(file: Path, **changes: Any) -> Path:
    file.write_text(json.dumps({**FOREIGN, **changes}))
    return file


def with_tokens(prompts: Any = TOKENS, **more: Any) -> list[dict[str, Any]]:
    steps = json.loads(json.dumps(FOREIGN["steps"]))
    for step, (prompt, sampled) in zip(steps[1:], prompts, strict=True):
        step["metrics"] = {"prompt_token_ids": prompt, "completion_token_ids": sampled, **more}
    return steps


def export(recording: Path, output: Path, *options: str) -> list[dict[str, Any]]:
    assert run_program(["episodes", str(recording), "--format", "atif", "--output", str(output), *options]) == 0
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def describe(recording: Path) -> dict[str, Any]:
    """What an import keeps of each episode."""
    found = {}
    for transcript in open_run(recording).transcripts():
        request, result = transcript.request, transcript.result
        turns = [(turn.turn, turn.seat, turn.messages, turn.tools, turn.action) for turn in transcript.turns]
        known = [
            (number, seat, messages, tools, action.text, action.tool_calls, action.versions, action.segment, action.origin)
            for number, seat, messages, tools, action in turns
            if action is not None
        ]
        assert request is not None
        found[request.episode_id] = known, request.task, request.seats, result and (
            result.outcome, result.reward, result.tokens, result.loss_mask, result.segments, result.untrained, result.task_key,
            result.last_observation, result.split, result.group_id, result.reward_components, result.seats,
        )  # fmt: skip
    return found


def test_every_kind_of_episode_is_a_trajectory_with_the_ids_of_the_log(tmp_path: Path) -> None:
    recording = write_run(tmp_path / "run.fbrec")
    trajectories = export(recording, tmp_path / "run.jsonl")
    for trajectory in trajectories:
        check_trajectory(trajectory)
    assert [each["trajectory_id"] for each in trajectories] == ["plain", "tree", "pictures", "failed", "game", "unfinished"]
    answers = list_exported_answers(trajectories)
    expected = list_answers(recording)
    assert {key: answers[key] for key in expected} == expected
    assert len(expected) == 16 and len(answers) == 17  # and that of the unfinished one


def test_segments_are_embedded_trajectories_and_copies_are_marked(tmp_path: Path) -> None:
    (tree,) = export(write_run(tmp_path / "run.fbrec"), tmp_path / "tree.json", "--outcome", "truncated")
    inner = {each["trajectory_id"]: each for each in tree["subagent_trajectories"]}
    assert {name: each["extra"]["reason"] for name, each in inner.items()} == {
        "tree.1": "context_dropped", "tree.2": "sub_agent", "tree.3": "history_edited"
    }  # fmt: skip
    copied = [(step["source"], step["message"]) for step in inner["tree.1"]["steps"] if step.get("is_copied_context")]
    assert copied == [("system", "Be brief."), ("user", "Find it.")]
    own = [step["message"] for step in inner["tree.1"]["steps"] if not step.get("is_copied_context")]
    assert own == ["Summed up.", "answer 2", "Done?", "answer 4"]
    assert not any(step.get("is_copied_context") for step in inner["tree.2"]["steps"])
    assert inner["tree.2"]["agent"]["tool_definitions"][0]["function"]["name"] == "look"
    references = [
        (step["message"], reference["trajectory_id"])
        for step in tree["steps"]
        for result in step.get("observation", {}).get("results", [])
        for reference in result["subagent_trajectory_ref"]
    ]
    assert references == [("answer 1", "tree.1")]
    assert (tree["extra"]["reward"], tree["extra"]["outcome"], tree["extra"]["policy_versions"]) == (0.25, "truncated", [3])


def test_each_seat_is_a_trajectory_with_its_policy_its_tokens_and_its_reward(tmp_path: Path) -> None:
    run = ExchangeRun()
    play_game(run, "game")
    (game,) = export(write_run(tmp_path / "run.fbrec", run), tmp_path / "game.json")
    check_trajectory(game)
    inner = {each["trajectory_id"]: each for each in game["subagent_trajectories"]}
    assert [each["agent"]["name"] for each in (game, *inner.values())] == ["proposer", "solver", "judge", "solver"]
    assert [each["agent"]["model_name"] for each in (game, *inner.values())] == ["default", "solver", "frozen-judge", "solver"]
    said = {name: [step["message"] for step in each["steps"]] for name, each in inner.items()}
    assert said == {
        "game.1": ["Solve.", "answer 1"], "game.2": ["Judge.", "answer 2"], "game.3": ["Solve.", "Again.", "answer 3"]
    }  # fmt: skip
    assert [step["message"] for step in game["steps"]] == ["Propose.", "answer 0", "Well?", "answer 4"]
    tokens = [(each["total_prompt_tokens"], each["total_completion_tokens"]) for each in (
        trajectory["final_metrics"] for trajectory in (game, inner["game.1"], inner["game.2"])
    )]  # fmt: skip
    assert tokens == [(4 + 11, 6), (4 + 8, 6), (4, 3)]
    reason = "the policy frozen-judge plays it, which is not trained here"
    facts = [
        (each["seat"], each["policy"], each["reward"], each.get("reason"), each["trajectory_id"])
        for each in game["extra"]["seats"]
    ]
    assert facts == [
        ("proposer", "default", 0.25, None, "game"), ("solver", "solver", 0.75, None, "game.1"),
        ("judge", "frozen-judge", None, reason, "game.2"),
    ]  # fmt: skip
    assert (inner["game.3"]["extra"]["seat"], inner["game.3"]["extra"]["reward"]) == ("solver", 0.75)
    references = [
        (step["message"], reference["trajectory_id"])
        for each in (game, *inner.values())
        for step in each["steps"]
        for result in step.get("observation", {}).get("results", [])
        for reference in result.get("subagent_trajectory_ref", ())
    ]
    assert references == [("answer 0", "game.1"), ("answer 0", "game.2"), ("answer 1", "game.3")]


def test_what_a_seat_is_shown_while_it_is_asked_stands_with_that_seat(tmp_path: Path) -> None:
    run = ExchangeRun()
    game: list[dict[str, Any]] = [{"seat": "a"}, {"seat": "b", "segment": 1, "origin": leave(-1, 0, "seat")}]
    run.play("game", game, outcome="open")
    for seat in ("b", "c"):
        asked = Observation(
            episode_id="game", attempt=1, turn=2, policy="default", messages=(say("user", f"{seat}?"),), seat=seat,
            tokens_left=9, environment_lane="e0", deadline_ns=1,
        )  # fmt: skip
        entries = [*run.entries]
        run.add(SUBJECTS.observation("default", "any", "game"), asked)
        (found,) = export(write_run(tmp_path / f"{seat}.fbrec", run), tmp_path / f"{seat}.json")
        run.entries[:] = entries
        last = [each["steps"][-1]["message"] for each in (found, *found["subagent_trajectories"])]
        assert last == ["answer 0", "b?" if seat == "b" else "answer 1"]


def test_an_import_gives_the_same_episodes_back(tmp_path: Path) -> None:
    recording = write_run(tmp_path / "run.fbrec")
    export(recording, tmp_path / "run.jsonl")
    assert run_program(["import", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "back.fbrec")]) == 0
    before, after = describe(recording), describe(tmp_path / "back.fbrec")
    assert {name: after[name] for name in before if name != "pictures"} == {
        name: each for name, each in before.items() if name != "pictures"
    }
    assert list_answers(tmp_path / "back.fbrec") == list_answers(recording)


def test_a_folder_gets_a_file_per_episode_and_filters_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = write_run(tmp_path / "run.fbrec")
    arguments = ["episodes", str(recording), "--format", "atif", "--output", str(tmp_path / "all")]
    assert run_program([*arguments, "--split", "train", "--min-reward", "0.2"]) == 0
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == ["game.json", "plain.json", "tree.json"]
    assert "3 of 3 episodes written" in capsys.readouterr().out
    assert run_program(["episodes", str(recording), "plain", "--format", "atif", "--output", str(tmp_path / "one.json")]) == 0
    assert json.loads((tmp_path / "one.json").read_bytes())["trajectory_id"] == "plain"
    assert run_program(["import", str(tmp_path / "all"), "-o", str(tmp_path / "back.fbrec")]) == 0
    assert set(describe(tmp_path / "back.fbrec")) == {"game", "plain", "tree"}


def test_another_tools_trajectory_is_read_with_its_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_foreign(tmp_path / "a.json", steps=with_tokens(logprobs=None), extra={"reward": 1, "task": "hello"})
    assert run_program(["import", str(file), "-o", str(tmp_path / "a.fbrec")]) == 0
    assert "1 with token ids and without log-probabilities" in capsys.readouterr().out
    (transcript,) = open_run(tmp_path / "a.fbrec").transcripts()
    assert transcript.result is not None and transcript.request is not None
    assert (transcript.result.reward, transcript.result.outcome, transcript.request.task.key) == (1.0, "completed", "hello")
    assert [message.role for turn in transcript.turns for message in turn.messages] == ["user", "tool"]
    (name,) = {episode for episode, _ in list_answers(tmp_path / "a.fbrec")}
    assert list_answers(tmp_path / "a.fbrec") == {
        (name, turn): (prompt, sampled, [0.0] * len(sampled)) for turn, (prompt, sampled) in enumerate(TOKENS)
    }


def test_a_prompt_that_does_not_go_on_begins_a_segment(tmp_path: Path) -> None:
    file = write_foreign(tmp_path / "a.json", steps=with_tokens((([1, 2, 3], [4, 5]), ([1, 2, 9, 8], [7]))))
    assert run_program(["import", str(file), "-o", str(tmp_path / "a.fbrec")]) == 0
    (transcript,) = open_run(tmp_path / "a.fbrec").transcripts()
    origin = transcript.turns[1].action and transcript.turns[1].action.origin
    assert origin is not None and (origin.parent, origin.kept, origin.reason) == (0, 2, "history_edited")
    assert [prompt for prompt, _, _ in list_answers(tmp_path / "a.fbrec").values()] == [[1, 2, 3], [1, 2, 9, 8]]


def test_without_ids_an_episode_can_be_graded_again_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, recording = write_foreign(tmp_path / "a.json"), tmp_path / "a.fbrec"
    assert run_program(["import", str(file), "-o", str(recording), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["episodes"], said["without_token_ids"], said["without_reward"]) == (1, 1, 1)
    (tmp_path / "v.py").write_text("def verify(conversation): return float(conversation[-1]['content'] == 'Done.')")
    assert run_program(["regrade", str(recording), "--verifier", f"{tmp_path / 'v.py'}:verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flips"][0]["new"] == 1.0


def test_learn_takes_what_has_ids_and_says_why_it_leaves_out_the_rest(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    steps = with_tokens()
    steps[1]["metrics"]["logprobs"], steps[2]["metrics"]["logprobs"] = [-0.5, -0.25], [-0.125]
    write_foreign(tmp_path / "all" / "a.json", steps=steps, extra={"reward": 1}, trajectory_id="with-ids")
    write_foreign(tmp_path / "all" / "b.json", extra={"reward": 1}, trajectory_id="text")
    assert run_program(["import", str(tmp_path / "all"), "-o", str(tmp_path / "a.fbrec")]) == 0
    found = select_rewarded([tmp_path / "a.fbrec"], min_reward=1.0, vocabulary=100)
    (sequence,) = found.sequences
    assert sequence.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert found.left_out == {"it has no token ids: they were redacted, or imported without": 1}


@pytest.mark.parametrize("file_format", ["atif", "eval"])
@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"logprobs": b"abc"}, "without log-probabilities"),
        ({"logprobs": pack_logprobs([math.nan] * 3)}, "without log-probabilities"),
        ({"prompt_delta": b"12345"}, "without token ids"),
    ],
)
def test_what_any_worker_may_write_into_a_log_can_be_written_and_read_back(
    tmp_path: Path, odd: dict[str, Any], says: str, file_format: str
) -> None:
    run = ExchangeRun()
    run.play("odd", [odd], timings={"step": math.nan}, reward_components={"judge": math.inf, "verifier": 1.0})
    write_run(tmp_path / "odd.fbrec", run)
    (row,) = open_run(tmp_path / "odd.fbrec").tokens()
    assert len(row.logprobs) == len(row.ids)
    exported, imported = tmp_path / ("odd.eval" if file_format == "eval" else "odd.jsonl"), tmp_path / "imported.fbrec"
    assert run_program(["episodes", str(tmp_path / "odd.fbrec"), "--format", file_format, "--output", str(exported)]) == 0

    assert run_program(["import", str(exported), "-o", str(imported)]) == 0

    (transcript,) = open_run(imported).transcripts()
    assert transcript.result is not None and says in transcript.result.note
    assert (transcript.result.timings, transcript.result.reward_components) == ({}, {"verifier": 1.0})


def test_no_name_of_an_episode_leads_out_of_the_folder(tmp_path: Path) -> None:
    """A subject of NATS may have slashes, and a recording is a stranger's."""
    run, name = ExchangeRun(), f"{tmp_path}/up"
    run.play(name, [{}])
    recording = write_run(tmp_path / "run.fbrec", run)

    assert run_program(["episodes", str(recording), "--format", "atif", "--output", str(tmp_path / "out")]) == 2

    assert [file.name for file in tmp_path.iterdir()] == ["run.fbrec"], "a name that is no name is not read"


def test_many_episodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    assembler = Assembler("imported", "train")
    made = [
        assembler._choose_name(ImportedEpisode(place="", name=name, turns=[])) for name in ("a", "a", "a-2", *["a"] * 50_000)
    ]
    assert made[:4] == ["a", "a-2", "a-2-2", "a-3"] and len(set(made)) == len(made)


def test_a_trial_of_harbor_brings_its_task_and_its_reward(tmp_path: Path) -> None:
    (tmp_path / "job" / "trial-1" / "agent").mkdir(parents=True)
    write_foreign(tmp_path / "job" / "trial-1" / "agent" / "trajectory.json")
    verdict = {"trial_name": "trial-1", "task_name": "org/hello", "verifier_result": {"rewards": {"reward": 0.5}}}
    (tmp_path / "job" / "trial-1" / "result.json").write_text(json.dumps(verdict))
    assert run_program(["import", str(tmp_path / "job"), "-o", str(tmp_path / "a.fbrec")]) == 0
    (transcript,) = open_run(tmp_path / "a.fbrec").transcripts()
    assert transcript.result is not None
    assert (transcript.result.episode_id, transcript.result.task_key, transcript.result.reward) == ("trial-1", "org/hello", 0.5)


FINISHED = EpisodeFinished(episode_id="e", group_id="g", attempt=1, outcome="verifier_unknown", worker="a.b")


def nest(depth: int) -> dict[str, Any]:
    steps = [{"step_id": 1, "source": "agent", "message": "x"}]
    inner = {"subagent_trajectories": [{**nest(depth - 1), "trajectory_id": "i"}]} if depth else {}
    return {**FOREIGN, "steps": steps, **inner}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no ATIF trajectory"),
        (b"[1", "is no ATIF trajectory"),
        (b"[" * 100_000, "is no ATIF trajectory"),
        (b"\xff\xfe", "is no ATIF trajectory"),
        ({"schema_version": "1"}, "schema_version"),
        ({"steps": []}, "length >= 1"),
        ({"steps": with_tokens((([1], [2]), ([1, 2], [-4])))}, "completion_token_ids"),
        ({"steps": with_tokens((([1], [2]), ([1, 2], [1 << 40])))}, "completion_token_ids"),
        ({"steps": with_tokens(logprobs=[0.5] * 3)}, "2 completion_token_ids have 3 logprobs"),
        ({"extra": {"fleetbus": {"request": {"type": "Other"}}}}, "is no EpisodeRequested"),
        ({"steps": [{"step_id": 1, "source": "agent", "message": "x", "extra": {"turn": 0, "seat": "a b"}}]}, "is no name"),
        ({"steps": [{"step_id": 1, "source": "agent", "message": "x", "extra": {"turn": 0, "worker": "*"}}]}, "worker is no"),
        ({"extra": {"fleetbus": {"result": msgspec.to_builtins(FINISHED)}}}, "worker is no name"),
        ({"steps": [{"step_id": 1, "source": "agent", "message": "x" * (1 << 20)}]}, "does not fit the messages of a log"),
        (nest(12), "deep in each other"),
    ],
)
def test_what_is_no_trajectory_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str
) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps({**FOREIGN, **content}).encode())
    assert run_program(["import", str(file), "-o", str(tmp_path / "a.fbrec")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error and len(error) < 600
    assert not (tmp_path / "a.fbrec").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "atif"], "needs --output"),
        (["--format", "atif", "--output", "a.csv"], "give FILE.jsonl, or a folder"),
        (["--format", "atif", "--output", "a.json"], "holds one episode, and 6 match"),
        (["--format", "eval", "--output", "a.zip"], "ends in .eval"),
        (["--format", "atif", "--output", "a.jsonl", "--task", "none"], "no episode matches"),
        (["nobody", "--format", "atif", "--output", "a.jsonl"], "there is no episode nobody"),
    ],
)
def test_a_wrong_output_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recording = write_run(tmp_path / "run.fbrec")
    assert run_program(["episodes", str(recording), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
    assert [file.name for file in tmp_path.iterdir()] == ["run.fbrec"]
