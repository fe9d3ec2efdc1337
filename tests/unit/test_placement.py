"""GPUs by role: none is taken twice, and what does not fit is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from fleetbus.config.load import load_configuration
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration, InferenceSettings, TrainerSettings
from fleetbus.errors import UserError
from fleetbus_workers.up.placement import VISIBLE, Placement, find_gpus, place_roles
from fleetbus_workers.up.process import ProcessPlan
from fleetbus_workers.up.process_plans import build_role_command, build_role_plans

EIGHT = tuple(map(str, range(8)))


def configured(engine: Literal["torch", "vllm"] = "vllm", workers: int = 4, vllm: str = "", **trainer: Any) -> Configuration:
    return Configuration(
        inference=InferenceSettings(engine=engine, workers=workers, vllm=vllm),
        trainer=TrainerSettings(**{"device": "cuda"} | trainer),
    )


def test_each_engine_has_a_gpu_and_the_learner_the_others() -> None:
    placement = place_roles(configured(), EIGHT)
    taken = [gpu for gpus in (placement.learner, *placement.inference) for gpu in gpus]
    assert sorted(taken) == list(EIGHT)
    assert placement.processes == 4
    assert placement.get_variables("learner", 0) == {VISIBLE: "4,5,6,7"}
    assert placement.get_variables("inference", 2) == {VISIBLE: "2"}
    assert placement.get_variables("environment", 0) == {VISIBLE: ""}
    assert placement.describe() == (
        "GPUs: learner on 4+5+6+7, 4 processes; inference-0 on 0, inference-1 on 1, inference-2 on 2, inference-3 on 3"
    )


@pytest.mark.parametrize(
    ("gpus", "learner", "engines"),
    [
        (("0",), ("0",), (("0",), ("0",))),
        (("0", "1"), ("0", "1"), (("0",), ("1",))),
        (("0", "1", "2"), ("2",), (("0",), ("1",))),
    ],
)
def test_engines_torch_have_gpus_of_their_own_where_there_are_enough_and_share_the_learners_where_not(
    gpus: tuple[str, ...], learner: tuple[str, ...], engines: tuple[tuple[str, ...], ...]
) -> None:
    wanted = configured("torch", workers=2)
    placement = place_roles(msgspec.structs.replace(wanted, inference=replace_device(wanted, "cuda")), gpus)
    assert (placement.learner, placement.inference, placement.processes) == (learner, engines, len(learner))
    with pytest.raises(UserError, match=r"inference\.device = cuda: no GPU is visible here"):
        place_roles(Configuration(inference=replace_device(wanted, "cuda")), ())


def test_gpus_by_number_are_for_all_roles_or_none_and_have_to_be_there() -> None:
    wanted = configured("torch", device="cuda:0")
    by_number = msgspec.structs.replace(wanted, inference=replace_device(wanted, "cuda:1"))
    assert not place_roles(by_number, ("0", "1")).decided
    with pytest.raises(UserError, match=r"^trainer\.device = cuda:0: no GPU is visible here; set trainer\.device = cpu"):
        place_roles(by_number, ())
    mixed = msgspec.structs.replace(configured("torch"), inference=by_number.inference)
    with pytest.raises(UserError, match=r"^inference\.device = cuda:1: `up` gives each role GPUs"):
        place_roles(mixed, ("0", "1"))


@pytest.mark.parametrize("setting", ["trainer.device", "inference.device"])
def test_a_device_that_torch_does_not_have_is_refused_where_it_is_set(setting: str) -> None:
    with pytest.raises(UserError, match="it takes auto, cpu, cuda, or a GPU by its number"):
        load_configuration(flags={setting: "gpu"})


def replace_device(configuration: Configuration, device: str) -> InferenceSettings:
    return msgspec.structs.replace(configuration.inference, device=device)


def test_an_engine_that_shares_its_model_over_gpus_gets_so_many() -> None:
    placement = place_roles(configured(workers=2, vllm='{"tensor_parallel_size": 2}'), EIGHT)
    assert placement.inference == (("0", "1"), ("2", "3")) and placement.learner == ("4", "5", "6", "7")
    assert placement.get_variables("inference", 1) == {VISIBLE: "2,3"}
    assert "inference-1 on 2+3" in placement.describe()


def test_processes_see_the_gpus_that_were_chosen_and_the_learner_is_launched_once_per_gpu(tmp_path: Path) -> None:
    configuration = configured(workers=2)
    plans = build_role_plans(
        configuration,
        run_folder(configuration.run),
        "nats://h",
        {VISIBLE: "0,1,2,3", "KEPT": "1"},
        build_role_command(tmp_path / "config.json"),
        placement=place_roles(configuration, ("0", "1", "2", "3")),
    )
    by_name = {plan.name: plan for plan in plans if isinstance(plan, ProcessPlan)}
    assert {name: plan.environment[VISIBLE] for name, plan in by_name.items()} == {
        "learner": "2,3",
        "environment": "",
        "inference-0": "0",
        "inference-1": "1",
    }
    command = list(by_name["learner"].command(0))
    assert (
        command[2:5] == ["-m", "torch.distributed.run", "--standalone"]
        and command[command.index("--nproc-per-node") + 1] == "2"
    )
    assert command[command.index("--") + 1 :][:2] == ["fleetbus_workers.cli", "learner"]
    assert "torch.distributed.run" not in by_name["inference-0"].command(0)


@pytest.mark.parametrize(
    ("configuration", "gpus", "reason"),
    [
        (configured(workers=1), ("0",), "need 2 GPUs, and 1 are visible"),
        (configured(workers=8), EIGHT, "need 9 GPUs, and 8 are visible"),
        (configured(vllm='{"tensor_parallel_size": 2}'), EIGHT, r"need 9 GPUs \(2 per worker\), and 8 are visible"),
        (configured(workers=2, device="cpu"), ("0",), "2 inference workers need 2 GPUs"),
        (configured(processes=5), EIGHT, "trainer.processes = 5: 4 GPUs are left"),
        (configured(), (), "no GPU is visible here"),
    ],
)
def test_what_does_not_fit_is_refused(configuration: Configuration, gpus: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        place_roles(configuration, gpus)


def test_without_gpus_nothing_is_decided() -> None:
    assert place_roles(Configuration(), ()) == Placement()
    assert place_roles(configured("torch", device="auto"), ()).get_variables("learner", 0) == {}
    assert place_roles(Configuration(), EIGHT).get_variables("learner", 0) == {}, "nothing uses them"
    assert place_roles(configured("torch", device="cpu", processes=2), ()).processes == 2


def test_visible_gpus_are_those_that_the_variable_names() -> None:
    assert find_gpus({VISIBLE: "3, GPU-8f2"}) == ("3", "GPU-8f2")
    assert find_gpus({VISIBLE: ""}) == find_gpus({VISIBLE: "-1"}) == ()
