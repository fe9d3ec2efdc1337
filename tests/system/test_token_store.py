"""The store of NeMo Gym's tokens on a real server, with stand-ins for the two modules of nemo_gym that it imports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fleetbus.bus.streams import plan_run
from fleetbus.client.capture_log import CaptureClosed, CaptureConflict
from fleetbus.client.nemo_gym import CAPTURES, URL_VARIABLE, TokenStore
from fleetbus.errors import UserError
from tests.support.backends import asyncio_alone
from tests.support.ports import free_ports
from tests.support.servers import running_servers

anyio_backend = asyncio_alone

PLAN = msgspec.structs.replace(plan_run(CAPTURES, lanes=0), consumers=())

LEFT_OPEN = """
import asyncio, sys
from fleetbus.client.nemo_gym import TokenStore
url, auth = sys.argv[1:]
store = TokenStore(url, auth=auth)
asyncio.run(store.begin_call("r", "call-1"))
asyncio.run(store.begin_call("r", "call-2"))
print("said")
"""


class Entry:
    """The part of a ``TokenEntry`` that a store looks at."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.rollout_id, self.model_call_id = fields["rollout_id"], fields["model_call_id"]

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return self.fields

    @staticmethod
    def model_validate(fields: dict[str, Any]) -> Entry:
        return Entry(**fields)


@pytest.fixture(autouse=True)
def nemo_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nemo_gym", "nemo_gym.token_id_capture"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nemo_gym.token_id_capture.records", SimpleNamespace(TokenEntry=Entry))
    protocols = SimpleNamespace(TokenCaptureSnapshot=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nemo_gym.token_id_capture.protocols", protocols)


def build_entry(call: str, tokens: int = 10) -> Entry:
    logprobs = [-0.1, float("-inf"), *[-1e-300] * tokens]
    return Entry(rollout_id="a rollout.*", model_call_id=call, prompt_token_ids=list(range(tokens)), logprobs=logprobs)


@pytest.mark.integration
async def test_entries_come_back_as_they_were_and_may_be_longer_than_a_message(tmp_path: Path) -> None:
    async with running_servers(tmp_path, [PLAN]) as servers:
        auth = str(servers.auth.path) if servers.auth else ""
        model_server, trainer = TokenStore(servers.url, auth=auth), TokenStore(servers.url, auth=auth)
        entries = [build_entry("call-1"), build_entry("call-2", 250_000)]
        for entry in entries:
            await model_server.begin_call(entry.rollout_id, entry.model_call_id)
            await model_server.put(entry)
            await model_server.put(entry)
        with pytest.raises(CaptureConflict):
            await TokenStore(servers.url, auth=auth).put(build_entry("call-1", 11))
        frozen = await trainer.freeze("a rollout.*")
        assert [entry.fields for entry in frozen.entries] == [entry.fields for entry in entries] and frozen.incomplete
        with pytest.raises(CaptureClosed):
            await model_server.put(build_entry("call-3"))
        assert await trainer.drop("a rollout.*", snapshot_id=frozen.snapshot_id, version=frozen.version)
        assert await trainer.sweep_retired(0.0) == 1
        for store in (model_server, trainer, trainer):
            await store.close()
        with pytest.raises(ValueError, match="closed"):
            await trainer.freeze("r")


@pytest.mark.integration
async def test_a_put_that_is_cancelled_can_be_made_again(tmp_path: Path) -> None:
    async with running_servers(tmp_path, [PLAN]) as servers:
        store = TokenStore(servers.url, auth=str(servers.auth.path) if servers.auth else "")
        entry = build_entry("call", 100_000)
        await store.mark_incomplete("another")
        for seconds in (0.0, 0.005, 0.02, 0.05):
            putting = asyncio.create_task(store.put(entry))
            await asyncio.sleep(seconds)
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
        await store.put(entry)
        frozen = await store.freeze(entry.rollout_id)
        assert [each.fields for each in frozen.entries] == [entry.fields] and not frozen.incomplete
        await store.close()


@pytest.mark.integration
async def test_a_program_that_leaves_it_open_ends_and_may_call_from_several_loops(tmp_path: Path) -> None:
    async with running_servers(tmp_path, [PLAN]) as servers:
        command = [sys.executable, "-c", LEFT_OPEN, servers.url, str(servers.auth.path) if servers.auth else ""]
        run = asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=50, check=False)
        done = await run
        assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")


@pytest.mark.integration
async def test_a_server_that_is_not_there_is_said_without_its_password_and_looked_for_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    store = TokenStore(f"nats://user:secret@127.0.0.1:{port}")
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            await store.freeze("r")
        assert "secret" not in str(refused.value) and "\n" not in str(refused.value)
    await store.close()


def test_without_an_address_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=URL_VARIABLE):
        TokenStore()
