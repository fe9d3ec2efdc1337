"""The platform of the tests is faithful: fleet-python itself plays an episode on it. Opt-in: `just test-fleet-sdk`.

The client runs in a process and an environment of its own, which ``FLEET_SDK_PYTHON`` names: it blocks, brings dozens of
warnings, and shall not decide about versions here.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.http_server import serve_application

PYTHON = os.environ.get("FLEET_SDK_PYTHON") or (sys.executable if find_spec("fleet") else "")
SCRIPT = Path(__file__).parents[1] / "support" / "fleet_platform" / "sdk_episode.py"

pytestmark = pytest.mark.skipif(not PYTHON, reason="fleet-python is not here: `just test-fleet-sdk` installs it beside")


@pytest.mark.timeout(300)
async def test_the_real_client_plays_an_episode(tmp_path: Path) -> None:
    platform = FleetPlatform()
    async with serve_application(platform.app) as server:
        variables = {"FLEET_API_KEY": KEY, "FLEET_BASE_URL": server.url, "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        with anyio.fail_after(240):
            process = await anyio.run_process([PYTHON, "-I", str(SCRIPT)], env=variables, check=False)
        assert process.returncode == 0, process.stderr.decode()[-2000:]
        seen = json.loads(process.stdout)
        made = platform.instances["inst1"]
        assert seen["version"] == "v1.2"
        assert seen["status"] == "running"
        assert seen["mcp"] == f"{server.url}/i/inst1/mcp"
        assert (seen["reset"], seen["heartbeat"]) == (True, True)
        assert seen["resources"] == ["sqlite://current"]
        assert seen["rows"] == [["ink", 9]]
        assert seen["verdict"][:2] == [True, 1.0]
        assert "App shop: 1" in seen["verdict"][2]
        assert seen["wrong"] == 0.0
        assert seen["listed"] == ["inst1"]
        assert (seen["closed"], seen["left"], seen["ended"]) == ("stopped", [], ["stopped"])
        assert made.shop.resets == [{"timestamp": None, "seed": 3}]
        assert made.body["data_version"] == "v0.4"
        assert made.beats == 1
        assert not platform.running
