"""NVIDIA's `run_conformance` on `fleetbus.client.nemo_gym`, also with its process and the server killed around every call.

`just test-foreign`; NEMO_GYM_WHEEL is the folder that the wheel of nemo-gym 0.7.0 was unpacked into, NEMO_GYM_NEEDS has orjson
for this interpreter: the modules of the contract run on Python 3.11, the package itself does not.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from fleetbus.bus.streams import plan_run
from fleetbus.client.nemo_gym import CAPTURES, TokenStore, build_lineage_store
from tests.support.nemo_gym_wheel import WHEEL, needs_wheel
from tests.support.servers import RunningServers, ServerGroup, running_servers

ROOT = Path(__file__).parents[2]
NEEDS = Path(os.environ.get("NEMO_GYM_NEEDS", str(ROOT / "build/nemo_gym_needs")))
CHECKS = 10

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.timeout(1800),
    needs_wheel,
]


@pytest.fixture(autouse=True)
def nemo_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NEEDS))
    monkeypatch.syspath_prepend(str(WHEEL))


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[RunningServers]:
    plan = msgspec.structs.replace(plan_run(CAPTURES, lanes=0), consumers=())
    async with running_servers(tmp_path, [plan]) as running:
        yield running


def name_folder(servers: RunningServers) -> str:
    return str(servers.auth.path) if servers.auth else ""


class KilledStore:
    """Each call is made by a process of its own, which is killed once it has answered, or, with ``doubled``, also once in the
    middle before it is made again. Before every ``restarts``-th call the server is killed and started."""

    calls = 0

    def __init__(self, servers: RunningServers, *, doubled: bool, restarts: int) -> None:
        self._servers = servers
        self._doubled = doubled
        self._restarts = restarts
        self._draw = random.Random(self.calls)

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            KilledStore.calls += 1
            question = pickle.dumps((self._servers.url, name_folder(self._servers), name, arguments, options))
            if KilledStore.calls % self._restarts == 0:
                group = ServerGroup(self._servers)
                await group.kill()
                await group.restart()
            if self._doubled:
                await anyio.to_thread.run_sync(self._ask, question, self._draw.uniform(0.0, 0.15))
            answer = pickle.loads(await anyio.to_thread.run_sync(self._ask, question, None))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    async def close(self) -> None:
        """There is nobody left to close."""

    def is_process_shared(self) -> bool:
        return True

    @staticmethod
    def _ask(question: bytes, killed_after: float | None) -> bytes:
        path = os.pathsep.join([str(ROOT), str(ROOT / "workers"), str(ROOT / "schemas"), str(WHEEL), str(NEEDS)])
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "capture_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert child.stdin and child.stdout and child.stderr
        try:
            child.stdin.write(question)
            child.stdin.flush()
            assert child.stderr.readline() == b"ready\n"
            if killed_after is None:
                return pickle.dumps(pickle.load(child.stdout))
            time.sleep(killed_after)
            return b""
        finally:
            child.kill()
            child.communicate()


async def test_all_checks_pass(servers: RunningServers) -> None:
    from nemo_gym.token_id_capture.conformance import run_conformance

    def store() -> TokenStore:
        return TokenStore(servers.url, auth=name_folder(servers))

    passed = await run_conformance(store, store, lambda: build_lineage_store(servers.url, auth=name_folder(servers)))
    print(f"{len(passed)} of {CHECKS} checks: {', '.join(passed)}")
    assert len(passed) == CHECKS


@pytest.mark.parametrize(("doubled", "restarts"), [(False, 2), (True, 3)], ids=["between calls", "also in the middle of calls"])
async def test_all_checks_pass_with_process_and_server_killed(servers: RunningServers, doubled: bool, restarts: int) -> None:
    from nemo_gym.token_id_capture.conformance import run_conformance

    def store() -> Any:
        return KilledStore(servers, doubled=doubled, restarts=restarts)

    before = KilledStore.calls
    passed = await run_conformance(store, store, store)
    print(f"{len(passed)} of {CHECKS} checks in {KilledStore.calls - before} calls, each by a process that was killed")
    assert len(passed) == CHECKS
