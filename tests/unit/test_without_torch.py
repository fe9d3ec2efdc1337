"""Without torch installed, a Tinker service trains and samples: nothing that such a run imports needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

HIDE = """
import importlib.machinery, json, sys

class Hiding:  # what a Python without torch finds
    find_spec = staticmethod(
        lambda name, path=None, target=None: None
        if name.partition(".")[0] in HIDDEN
        else importlib.machinery.PathFinder.find_spec(name, path, target)
    )

sys.meta_path = [Hiding if each is importlib.machinery.PathFinder else each for each in sys.meta_path]
"""

CHECK = """
import msgspec
from fleetbus.config.settings import Configuration, InferenceSettings, LearnerSettings
from fleetbus.errors import UserError
from fleetbus_workers.up import checks

def refuse(engine, trainer):
    configuration = Configuration(
        inference=msgspec.convert({"engine": engine}, InferenceSettings),
        learner=msgspec.convert({"trainer": trainer}, LearnerSettings),
    )
    try:
        checks.check_installed(configuration)
    except UserError as error:
        return str(error)
    return ""

print(json.dumps([refuse("tinker", "tinker"), refuse("torch", "torch"), refuse("openai", "torch")]))
"""

LOAD = """
from fleetbus_workers.cli.roles import environment, inference, learner
for role in (environment, inference, learner):
    role._load_work()
import fleetbus_workers.inference.tinker, fleetbus_workers.learner.tinker, fleetbus_workers.tinker_service
import fleetbus_workers.up.command, fleetbus_workers.up.run
print(json.dumps(["torch" in sys.modules]))
"""


def run_without(hidden: set[str], code: str) -> Any:
    ended = subprocess.run(
        [sys.executable, "-c", f"HIDDEN = {hidden!r}\n{HIDE}{code}"], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_run_on_a_tinker_service_asks_for_tinker_and_not_for_torch() -> None:
    tinker, torch, served = run_without({"torch", "safetensors", "tinker"}, CHECK)
    assert tinker == "tinker not installed: pip install 'fleetbus[server,environment,tinker]'"
    assert torch == served == "safetensors, torch not installed: pip install 'fleetbus[local]'"


@pytest.mark.integration
def test_every_role_of_such_a_run_is_imported_without_torch() -> None:
    assert run_without({"torch", "safetensors"}, LOAD) == [False]


def test_views_and_an_audit_are_imported_without_numpy() -> None:
    """Their images have none."""
    code = """
import fleetbus_workers.observe.monitor.app, fleetbus_workers.cli.look.monitor, fleetbus_workers.observe.metrics.run_view
import fleetbus_workers.cli.look.top, fleetbus.audit.run
print(json.dumps(["numpy" in sys.modules]))
"""
    assert run_without({"torch", "numpy"}, code) == [False]
