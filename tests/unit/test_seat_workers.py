"""The workers that `up` starts for the policies of seats, and the learners that have nothing to train."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fleetbus.config.load import load_configuration
from fleetbus.config.run_folder import policy_folder, run_folder
from fleetbus.config.seats import (
    check_learner,
    configure_learner,
    freeze_trained,
    list_trained_seats,
    parse_seats,
    resolve_models,
)
from fleetbus.config.settings import (
    Configuration,
    InferenceSettings,
    LearnerSettings,
    RewardSettings,
    RunSettings,
    TrainerSettings,
    WeightsSettings,
)
from fleetbus.errors import UserError
from fleetbus_workers.up.checks import check_policies_of_seats
from fleetbus_workers.up.placement import VISIBLE, place_roles
from fleetbus_workers.up.process import ProcessPlan
from fleetbus_workers.up.process_plans import build_role_command, build_role_plans
from fleetbus_workers.up.seat_workers import SeatWorker, check_seat_names, describe_unserved_seats, list_seat_workers

SEATS = "customer=http://127.0.0.1:1\nsolver=train:models/small\nold=model:models/old"


def configured(seats: str = SEATS) -> Configuration:
    return Configuration(run=RunSettings(name="r", seats=seats), learner=LearnerSettings(threads=2))


def get_workers(configuration: Configuration) -> dict[str, SeatWorker]:
    return {worker.name: worker for worker in list_seat_workers(configuration)}


def test_a_trained_seat_has_a_learner_and_every_served_one_an_inference_worker() -> None:
    workers = get_workers(configured())
    assert list(workers) == ["learner-solver", "inference-solver", "inference-old", "inference-customer"]
    learner = workers["learner-solver"]
    options = dict(zip(learner.options[::2], learner.options[1::2], strict=True))
    assert options == {
        "--run-policy": "solver",
        "--run-model": "models/small",
        "--learner-requested-by": "default",
        "--evaluation-episodes": "0",
    }
    assert "--inference-frozen" in workers["inference-old"].options
    assert "--inference-frozen" not in workers["inference-solver"].options
    assert list_seat_workers(configured("user=simulator")) == []


def test_its_learner_writes_into_a_folder_of_its_own_and_has_the_threads_of_a_learner() -> None:
    configuration = configured()
    learner = get_workers(configuration)["learner-solver"]
    folder = run_folder(configuration.run).path / "policies" / "solver"
    assert learner.output == (folder / "checkpoints", folder / "model") and learner.threads == 2
    plans = build_role_plans(configuration, run_folder(configuration.run), "nats://h", {}, build_role_command(Path("c.json")))
    (plan,) = (plan for plan in plans if plan.name == "learner-solver")
    assert isinstance(plan, ProcessPlan) and plan.environment["OMP_NUM_THREADS"] == "2"
    assert plan.environment["OMP_WAIT_POLICY"] == "PASSIVE", "a thread that spins takes a core from the other roles"
    assert plan.log == run_folder(configuration.run).logs / "learner-solver.log"
    command = list(plan.command(1))
    assert command[command.index("--name") + 1] == "learner-solver-1" and tuple(command[-8:]) == learner.options


def test_the_options_of_its_learner_are_settings_of_a_learner() -> None:
    options = get_workers(configured())["learner-solver"].options
    flags = {
        flag[2:].replace("-", ".", 1).replace("-", "_"): value for flag, value in zip(options[::2], options[1::2], strict=True)
    }
    loaded = load_configuration(flags={**flags, "run.seats": SEATS, "run.name": "r"})
    assert loaded.configuration.learner.requested_by == "default"
    check_learner(loaded.configuration)
    assert policy_folder(loaded.configuration.run).path.name == "solver"


@pytest.mark.parametrize("seat", ["1", "solver-2"])
def test_a_seat_whose_worker_would_have_the_name_of_a_restart_is_refused(seat: str) -> None:
    with pytest.raises(UserError, match="numbers the starts of its workers"):
        check_seat_names(parse_seats(f"{seat}=train"))
    check_seat_names(parse_seats(f"{seat}=other\nplayer_2=train"))


@pytest.mark.parametrize(
    ("policy", "seats", "asks", "reason"),
    [
        ("solver", "solver=train", "solver", "is the policy that this learner trains"),
        ("solver", "", "default", "has no seat that is trained"),
        ("other", "solver=train", "default", "has no seat that is trained"),
        ("solver", "solver=train\nproposer=train", "proposer", "whose learner asks for nothing"),
        ("solver", "solver=train", "", "trained by a learner of its own"),
        ("solver", "solver=train", "a policy", "no name of a policy"),
    ],
)
def test_a_learner_that_would_train_nothing_is_refused(policy: str, seats: str, asks: str, reason: str) -> None:
    run = RunSettings(name="r", policy=policy, seats=seats)
    with pytest.raises(UserError, match=reason):
        check_learner(Configuration(run=run, learner=LearnerSettings(requested_by=asks)))


def test_what_one_of_several_learners_cannot_do_is_refused() -> None:
    given = configured("solver=train")
    check_learner(given)
    with pytest.raises(UserError, match=r"learner\.trainer = torch alone"):
        check_learner(replace(given, learner=LearnerSettings(trainer="tinker")))
    judge = RewardSettings(judge_url="http://h", judge_mode="group", judge_rubric="r")
    with pytest.raises(UserError, match="a judge of groups"):
        check_learner(replace(given, reward=judge))
    served = WeightsSettings(public_url="http://h/w")
    with pytest.raises(UserError, match="each policy has its own"):
        check_learner(replace(given, weights=served))
    check_learner(replace(given, weights=replace(served, store="nats")))
    with pytest.raises(UserError, match="has one policy's weights: choose torch or vllm"):
        check_policies_of_seats(replace(given, inference=InferenceSettings(engine="openai", urls="http://h")))
    with pytest.raises(UserError, match="no model folder"):
        check_policies_of_seats(configured("solver=train:/nowhere"))
    with pytest.raises(UserError, match="`up` sets it"):
        check_policies_of_seats(replace(given, learner=LearnerSettings(requested_by="default")))
    with pytest.raises(UserError, match="trained by a learner of its own"):
        check_policies_of_seats(configured("default=train"))


def test_its_learner_begins_with_its_own_part_of_a_fork() -> None:
    given = configured()
    begun = replace(given, learner=LearnerSettings(begin_with="/runs/new/origin"))
    (seat,) = list_trained_seats(given.run)
    assert configure_learner(begun, seat).learner.begin_with == "/runs/new/policies/solver/origin"
    assert configure_learner(given, seat).learner.begin_with == ""


def test_models_of_seats_are_resolved_and_nothing_else_is_changed() -> None:
    text = "a=other\nb=m@http://h/v1\nc=model:x\nd=train:y\ne=train"
    assert resolve_models(text, str.upper) == "a=other\nb=m@http://h/v1\nc=model:X\nd=train:Y\ne=train"
    assert resolve_models("", str.upper) == ""


def test_where_nobody_trains_a_seat_is_played_by_the_model_that_it_would_begin_with() -> None:
    text = "a=other\nb=m@http://h/v1\nc=model:x\nd=train:y\ne=train"
    assert freeze_trained(text, "z") == "a=other\nb=m@http://h/v1\nc=model:x\nd=model:y\ne=model:z"


def test_learners_divide_the_gpus_that_are_left_and_each_engine_has_its_own() -> None:
    run = RunSettings(name="r", seats=SEATS)
    given = Configuration(
        run=run, inference=InferenceSettings(engine="vllm", workers=2), trainer=TrainerSettings(device="cuda")
    )
    placement = place_roles(given, tuple(map(str, range(8))))
    assert placement.inference == (("0",), ("1",), ("2",), ("3",))
    assert placement.learners == (("4", "5"), ("6", "7")) and placement.processes == 2
    variables = {worker.name: placement.get_variables(worker.role, worker.index) for worker in list_seat_workers(given)}
    assert variables == {
        "learner-solver": {VISIBLE: "6,7"},
        "inference-solver": {VISIBLE: "2"},
        "inference-old": {VISIBLE: "3"},
        "inference-customer": {VISIBLE: ""},
    }
    assert placement.describe() == (
        "GPUs: learner on 4+5, 2 processes; learner of a seat on 6+7; "
        "inference-0 on 0, inference-1 on 1, inference-solver on 2, inference-old on 3"
    )
    with pytest.raises(UserError, match=r"4 inference worker\(s\) and 2 learners need 6 GPUs"):
        place_roles(given, ("0", "1", "2", "3", "4"))
    shared = place_roles(replace(given, inference=InferenceSettings(engine="torch", device="cuda")), ("0",))
    assert shared.learners == (("0",), ("0",)) and set(shared.inference) == {("0",)} and shared.processes == 1


def test_seats_whose_policy_nobody_serves_are_named() -> None:
    seats = "a=train\nb=other\nc=http://127.0.0.1:9/v1\nd=default"
    configuration = Configuration(run=RunSettings(seats=seats, policy="default"))
    (line,) = describe_unserved_seats(configuration)
    assert "the seat b waits" in line and "policy other" in line and "--seat b=train" in line
