"""The profile of a run: the same settings however its roles are started, printed by each, recorded with the lineage."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fleetbus.config.profile import apply_profile, describe_profile
from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings, TrainerSettings
from fleetbus.errors import UserError
from fleetbus_workers.cli.roles import role as roles
from fleetbus_workers.command.exit_status import REFUSED
from fleetbus_workers.learner.resume import select_lineage_settings
from fleetbus_workers.up import command as up
from fleetbus_workers.up.model_limits import fit_run
from tests.support.model_configs import MODELS
from tests.unit.test_helm_chart import containers, read_manifests, render

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
EIGHT = ",".join(map(str, range(8)))
H100 = 81_559 << 20
ROLES = ("learner", "inference", "environment")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-8B"]))
    return tmp_path


@pytest.fixture(autouse=True)
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with eight GPUs, as far as anything can tell, with vLLM beside it and no file of settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", EIGHT)
    monkeypatch.setattr(up, "find_memory", lambda: H100)
    monkeypatch.setattr("fleetbus_workers.up.placement.find_memory", lambda: H100)


def print_of_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The settings in the line that `up` prints of the profile."""
    mine = Configuration(run=RunSettings(model=str(folder)), inference=InferenceSettings(python="python"))
    up.fit_gpus(fit_run(mine, {}), {"inference.python": ""})
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("profile "))
    return split(line)


def split(line: str) -> set[str]:
    name, _, settings = line.partition(": ")
    assert name == "profile gpu"
    return set(settings.split(", "))


def print_of_role(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: Mapping[str, str]
) -> set[str]:
    """The settings in the line that a role prints before it works, started with these variables and no flags."""

    def refuse(load_work: object) -> Any:
        raise UserError("as far as this test goes")

    monkeypatch.setattr(roles, "import_work", refuse)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert roles.run_role(role, lambda: None, {}) == REFUSED  # type: ignore[arg-type, return-value]
    for name in variables:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", EIGHT)
    first, last = map(json.loads, capsys.readouterr().err.splitlines())
    assert last["reason"] == "as far as this test goes"
    return split(first["event"])


def read_compose(service: str) -> dict[str, str]:
    """The variables of a service where PROFILE=gpu was set."""
    found = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["environment"]
    return {name: re.sub(r"\$\{(\w+):-(.*?)\}", _substitute, value) for name, value in found.items()}


def _substitute(match: re.Match[str]) -> str:
    return "gpu" if match[1] == "PROFILE" else match[2]


def read_pod(objects: dict[tuple[str, str], dict[str, Any]], container: str) -> dict[str, str]:
    shared = objects["ConfigMap", "fleetbus"]["data"]
    return shared | {each["name"]: each["value"] for each in containers(objects)[container].get("env", [])}


def list_ways() -> dict[str, dict[str, dict[str, str]]]:
    """Variables by the way of starting and by role."""
    by_hand = {"FLEETBUS_NATS_URL": "nats://h"}
    chart, manifests = render("gpu=true"), read_manifests("inference.yaml", "learner.yaml")
    manifests["ConfigMap", "fleetbus"]["data"]["FLEETBUS_RUN_PROFILE"] = "gpu"  # as gpu.yaml says
    return {
        "by hand": {
            "learner": by_hand,
            "inference": by_hand,
            "environment": by_hand | {"FLEETBUS_RUN_PROFILE": "gpu", "CUDA_VISIBLE_DEVICES": ""},
        },
        "compose": {
            "learner": read_compose("learner-gpu"),
            "inference": read_compose("inference-gpu"),
            "environment": read_compose("environment") | {"CUDA_VISIBLE_DEVICES": ""},
        },
        "kubernetes": {role: read_pod(manifests, role) for role in ROLES},
        "helm": {role: read_pod(chart, role) for role in ROLES},
    }


@pytest.mark.parametrize("way", ["by hand", "compose", "kubernetes", "helm"])
def test_every_way_of_starting_prints_the_settings_that_up_prints(
    way: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = print_of_up(folder, capsys)
    started = list_ways()[way]
    found = set()
    for role in ROLES:
        variables = started[role] | {"FLEETBUS_RUN_MODEL": str(folder), "FLEETBUS_LOG_FORMAT": "json"}
        variables |= {"FLEETBUS_RUN_FOLDER": str(folder / "runs")}
        found |= print_of_role(role, monkeypatch, capsys, variables)
    assert found == wanted
    assert {"learner.learning_rate = 1e-06", "episode.max_tokens = 1024", "inference.max_model_len = 8192"} < found
    assert {"trainer.published_dtype = bfloat16", "limits.action = 1800"} < found


def test_an_inference_worker_by_hand_fills_the_gpus_that_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETBUS_RUN_MODEL", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    alone = roles.load_fitted("inference", {}).inference
    assert (alone.vllm, alone.max_num_seqs, alone.slots) == ("", 88, 176)
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-32B"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert roles.load_fitted("inference", {}).inference.vllm == '{"tensor_parallel_size":2}'


def test_what_was_given_stays_and_a_laptop_keeps_its_defaults(folder: Path) -> None:
    mine = Configuration(run=RunSettings(model=str(folder)), trainer=TrainerSettings(device="cpu"))
    given = {"trainer.device": "--trainer-device", "episode.max_tokens": ""}
    fitted = apply_profile(mine, given, has_gpus=True)
    assert (fitted.trainer, fitted.learner, fitted.episode) == (mine.trainer, mine.learner, mine.episode)
    assert fitted.inference.dtype == "bfloat16"
    laptop = apply_profile(mine, {}, has_gpus=False)
    assert laptop.run.profile == "laptop" and "learner.learning_rate = 0.0003" in describe_profile(laptop, "learner")
    forced = Configuration(run=RunSettings(model=str(folder), profile="laptop"))
    assert apply_profile(forced, {}, has_gpus=True) == forced


def test_the_lineage_records_the_profile() -> None:
    fitted = apply_profile(Configuration(run=RunSettings(profile="gpu")), {}, has_gpus=False)
    recorded = select_lineage_settings(fitted)["profile"]
    assert (recorded["run.profile"], recorded["learner.learning_rate"]) == ("gpu", 1e-6)


def test_roles_under_up_take_its_file_and_ask_no_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_gpus(variables: Mapping[str, str]) -> tuple[str, ...]:
        raise AssertionError(f"asked with {len(os.environ)} variables")

    monkeypatch.setattr("fleetbus_workers.up.placement.find_gpus", find_gpus)
    assert roles.load_fitted("learner", {"supervised": True}).run.profile == "laptop"
