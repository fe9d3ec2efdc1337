"""The contract needs msgspec and the standard library alone: anybody can speak it without installing fleetbus."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import importlib.abc, sys

class Gate(importlib.abc.MetaPathFinder):
    allowed = sys.stdlib_module_names | {"msgspec", "fleetbus_schemas"}

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.allowed:
            raise ModuleNotFoundError(f"blocked: {fullname}")
        return None

sys.meta_path.insert(0, Gate())
"""

ROUND_TRIP = """
import fleetbus_schemas as schemas, fleetbus_schemas.export, fleetbus_schemas.tokens
message = schemas.Action(episode_id="e", attempt=1, turn=0, text="hi", sampled=fleetbus_schemas.tokens.pack_ids([1, 2]))
assert schemas.decode(schemas.Action, schemas.encode(message)) == message
assert fleetbus_schemas.export.build_json_schema()["$defs"]
foreign = {name.partition(".")[0] for name in sys.modules} & {"fleetbus", "fleetbus_workers", "anyio", "nats", "asyncio"}
assert not foreign, foreign
print("works")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, timeout=30, check=False)


def test_the_contract_imports_encodes_and_decodes_with_everything_else_blocked() -> None:
    result = run(ROUND_TRIP)
    assert result.stdout == "works\n", result.stderr


def test_the_gate_of_this_test_does_block() -> None:
    for module in ("anyio", "fleetbus", "numpy"):
        result = run(f"import {module}")
        assert result.returncode == 1
        assert f"blocked: {module}" in result.stderr
