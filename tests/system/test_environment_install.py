"""An environment worker needs no torch: neither to be imported nor to be installed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "vllm", "matplotlib")

IMPORTS = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
import fleetbus_workers.cli.roles.environment
fleetbus_workers.cli.roles.environment._load_work()
from fleetbus_workers.environment.isolation.verifier import Verifier
from fleetbus_workers.environment.specs import build_environment_factory
build_environment_factory("warehouse", verifier=Verifier())()
print("imported")
"""


@pytest.mark.integration
def test_the_environment_role_imports_where_torch_is_not_installed() -> None:
    """The blocker stands for an environment without these packages; the slow test below builds a real one."""
    source = IMPORTS.format(blocked=set(BLOCKED))
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported"


@pytest.mark.integration
def test_the_blocker_would_notice_a_role_that_needs_torch() -> None:
    source = IMPORTS.format(blocked=set(BLOCKED)) + "\nimport fleetbus_workers.learner.torch.trainer"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "is not installed here" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_installing_an_environment_worker_brings_no_torch(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"{ROOT}[environment]"], check=True, timeout=500)
    listed = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True, timeout=60)
    installed = {line.split()[0].lower() for line in listed.stdout.splitlines()[2:]}
    assert not installed & set(BLOCKED)
    assert {"nats-py", "mcp", "msgspec", "fleetbus"} <= installed
    subprocess.run([tmp_path / "bin" / "fleetbus", "environment", "--help"], check=True, timeout=30, capture_output=True)
