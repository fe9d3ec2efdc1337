"""The curves of a run in which several policies are trained: each has its own, on the page and in a copy of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.token_record import StepTokens, TrainedTokens, build_record_path, digest_record, encode_step
from fleetbus.recording.trained_tokens import TrainedTokensIndex
from fleetbus_schemas import LineageStarted, Message, StepTrained, Subjects, encode
from fleetbus_schemas.tokens import pack_ids, pack_logprobs, pack_mask
from fleetbus_workers.observe.bundle.copied_run import RunCopier
from fleetbus_workers.observe.monitor.shown_run import count_points, describe_curves
from fleetbus_workers.observe.run.state import RunState

SUBJECTS = Subjects("r")
JOINS: dict[str, Any] = {"learner": {"requested_by": "default"}}


class Log:
    """Entries of two learners, and a fold of them."""

    def __init__(self) -> None:
        self.state = RunState(steps=10)
        self.entries: list[StreamEntry] = []

    def add(self, policy: str, message: Message) -> None:
        sequence = len(self.entries) + 1
        entry = StreamEntry(subject=SUBJECTS.train(policy), payload=encode(message), sequence=sequence, time_ns=sequence)
        self.entries.append(entry)
        self.state.apply(entry, message, now=0.0, now_ns=sequence)

    def begin(self, policy: str, **fields: Any) -> None:
        settings = JOINS if policy == "solver" else {}
        self.add(policy, LineageStarted(**{"lineage": "a", "worker": "w", "settings": settings} | fields))

    def step(self, policy: str, number: int, lineage: str = "a", **fields: Any) -> None:
        metrics = fields.pop("metrics", {"reward": 0.5, "success": 0.25, f"reward_of_{policy}": number / 10, "loss": 1.0})
        self.add(policy, StepTrained(lineage=lineage, step=number, version=number, episodes=("e",), metrics=metrics, **fields))


@pytest.fixture
def log() -> Log:
    log = Log()
    for policy in ("default", "solver"):
        log.begin(policy)
    for number in (1, 2):
        log.step("default", number)
        log.step("solver", number)
    log.step("solver", 3)
    return log


def read(curves: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(curves))


def test_each_policy_has_the_points_of_its_own_steps_and_the_reward_of_its_own_seats(log: Log) -> None:
    curves = read(describe_curves(log.state))
    assert (curves["policy"], list(curves["others"])) == ("default", ["solver"])
    assert [(point["step"], point["metrics"]["reward"]) for point in curves["points"]] == [(1, 0.5), (2, 0.5)]
    solver = curves["others"]["solver"]["points"]
    assert [(point["step"], point["metrics"]["reward"]) for point in solver] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert all("success" not in point["metrics"] and point["metrics"]["loss"] == 1.0 for point in solver)
    assert log.state.progress.step == 2  # no step is counted twice


def test_a_policy_sends_the_points_that_are_new(log: Log) -> None:
    drawn, history = count_points(log.state), log.state.history
    assert drawn == {"default": 2, "solver": 3}
    log.step("solver", 4)
    curves = read(describe_curves(log.state, drawn))
    assert (curves["start"], curves["points"], curves["others"]["solver"]["start"]) == (2, [], 3)
    assert [point["step"] for point in curves["others"]["solver"]["points"]] == [4]
    assert log.state.history == history


def test_a_learner_that_goes_back_loses_its_points_alone_and_the_curves_are_drawn_again(log: Log) -> None:
    history = log.state.history
    log.begin("solver", lineage="b", parent="a", parent_step=1)
    log.step("solver", 2, "b")
    assert log.state.history == history + 1
    assert count_points(log.state) == {"default": 2, "solver": 2}
    assert [(point.step, point.lineage) for point in log.state.others["solver"].steps] == [(1, "a"), (2, "b")]


def test_a_run_of_one_policy_has_no_others() -> None:
    log = Log()
    assert describe_curves(log.state) == {"policy": "", "start": 0, "points": [], "others": {}, "evaluations": []}
    log.begin("default")
    log.step("default", 1)
    assert (count_points(log.state), describe_curves(log.state)["others"]) == ({"default": 1}, {})


async def test_a_copy_has_the_curves_of_all_policies_and_the_token_records_of_each(tmp_path: Path) -> None:
    log, own, joined = Log(), tmp_path / "r" / "tokens", tmp_path / "r" / "policies" / "solver" / "tokens"
    for policy, folder, place in (("default", own, 1), ("solver", joined, 3)):
        contents = encode_step(StepTokens("a", 1, (trained_token(place),)))
        file = build_record_path(folder, "a", 1)
        file.parent.mkdir(parents=True)
        file.write_bytes(contents)
        log.begin(policy)
        log.step(policy, 1, token_record=digest_record(contents))

    async def entries(_: list[str]) -> AsyncGenerator[StreamEntry]:
        for entry in log.entries:
            yield entry

    index = TrainedTokensIndex(own)
    copier = RunCopier(entries, SUBJECTS, Redactor(), index, steps=1, threshold=1.0, now_ns=9, joined=("solver",))
    await copier.read_run(used_bytes=1, limit_bytes=0)
    curves = read(copier.describe_run([], {}, "0 episodes")["curves"])
    assert [len(each["points"]) for each in (curves, curves["others"]["solver"])] == [1, 1]
    found = index.find("e")
    assert found is not None and found.places == pack_ids([1, 3])


def trained_token(place: int) -> TrainedTokens:
    numbers = pack_logprobs([-1.0])
    return TrainedTokens("e", 1, pack_ids([place]), numbers, numbers, pack_mask([False]))
