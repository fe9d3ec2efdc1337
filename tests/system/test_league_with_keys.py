"""A league whose workers have keys: it trains, and no worker tries what its key does not allow."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import anyio
import pytest

from fleetbus.auth.access import build_access
from fleetbus.bus import nats
from fleetbus.errors import NotPermitted
from fleetbus_schemas import Subjects
from tests.system.test_league_by_up import COMMAND, LEAGUE, PLAYED, SMALL, VARIABLES, call

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

RUN = "kuhn"
REFUSED = re.compile(r"(?i)(violation|does not let the user).*")


def find_refusals(run: Path) -> list[str]:
    """Words of the server's and the workers' logs about what a key did not allow."""
    files = [run / "nats" / "nats-server.log", *sorted((run / "logs").glob("*.log"))]
    texts = [file.read_text(errors="replace") for file in files]
    return [found[0] for text in texts for found in REFUSED.finditer(text)]


async def try_to_publish_a_version(folder: Path, port: str) -> None:
    """As an environment worker, which may not."""
    access = build_access("environment", str(folder / "keys"), RUN)
    url = f"tls://localhost:{port}"
    with pytest.raises(NotPermitted):
        async with nats.connect(url, run=RUN, role="environment", worker="environment-9", **access) as bus:
            await bus.publish(Subjects(RUN).policy("second"), b"forged")


def test_a_league_trains_with_keys_and_tries_nothing_that_they_do_not_allow(tmp_path: Path) -> None:
    call(tmp_path, "auth", "init", "keys", "--run", RUN, "--policy", "default", "--policy", "second")
    run = tmp_path / ".fleetbus" / "runs" / RUN
    command = [*COMMAND, "up", "--nats-auth", "keys", *PLAYED, *LEAGUE, *SMALL]
    with subprocess.Popen(
        command, cwd=tmp_path, env=VARIABLES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        shown = ""
        for line in up.stdout:
            shown += line
            if line.startswith("step 3/4"):
                assert find_refusals(run) == []
                anyio.run(try_to_publish_a_version, tmp_path, (run / "port").read_text().strip())
    assert up.returncode == 0 and "finished" in shown, shown
    refusals = find_refusals(run)
    assert refusals and all("policy.second" in each for each in refusals), f"the forged one alone is refused: {refusals}"
    assert "the audit balances" in call(tmp_path, "audit", RUN, "--nats-auth", "keys", "--deep")
