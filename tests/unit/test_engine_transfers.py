"""Versions that the processes of an engine receive from the learner themselves: all of them whole and equal to the log's, or
none is loaded. The processes are threads here, and vLLM is not needed: `tests/engines/test_vllm_transfer.py` has it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from msgspec.structs import replace

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus_schemas import Heartbeat, PolicyPublished, Subjects, WeightsOffered
from fleetbus_workers.inference.vllm import transfers, worker_extension
from fleetbus_workers.inference.vllm.worker_extension import WorkerExtension
from fleetbus_workers.weights.collective import group, stream
from fleetbus_workers.weights.collective.engine_receiver import EngineReceiver
from fleetbus_workers.weights.collective.sender import MOST_PROCESSES, CollectiveSender
from fleetbus_workers.weights.collective.written_file import WrittenFile
from fleetbus_workers.weights.file import write_weights
from fleetbus_workers.weights.transfer import ENGINE_COUNTER, PROCESSES_COUNTER, Fetch, TransferFailed
from tests.support.backends import asyncio_alone

pytestmark = pytest.mark.anyio
anyio_backend = asyncio_alone

SUBJECTS = Subjects("transfer")
LIMIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 256)
    monkeypatch.setattr(group, "JOIN_SECONDS", 20.0)
    monkeypatch.setattr(transfers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(worker_extension, "_forget_expert_kernels", lambda worker: None)


def build_tensors(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {f"w{index}": torch.randn(7, 33) for index in range(4)}


def write_version(folder: Path, version: int, watcher: WrittenFile | None) -> PolicyPublished:
    file = folder / f"{version}"
    manifest = write_weights(file, build_tensors(version), watcher)
    return PolicyPublished(policy="p", version=version, lineage="l", step=0, uri=file.as_uri(), manifest=manifest, size_bytes=1)


class Process(WorkerExtension):
    """A process of vLLM that computes."""

    def __init__(self) -> None:
        self.loaded: Mapping[str, torch.Tensor] = {}

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = dict(weights_iterator)


class Engine:
    """Asks its processes as vLLM's does, and stands for the sampler."""

    max_version_bytes = 1 << 20

    def __init__(self, processes: int) -> None:
        self.processes = [Process() for _ in range(processes)]
        self.head: dict[str, str] = {}

    @property
    def receiving_processes(self) -> int:
        return len(self.processes)

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[Any]:
        await anyio.lowlevel.checkpoint()
        return [getattr(process, method)(*args) for process in self.processes]

    async def receive_version(self, offered: WeightsOffered, seconds: float, given_up: threading.Event) -> None:
        await transfers.receive(self, offered, limit_bytes=self.max_version_bytes, seconds=seconds, given_up=given_up)

    async def load_received(self, token: str, policy: PolicyPublished, fetch: Fetch) -> bool:
        if await transfers.find_difference(self, token, policy):
            return False
        await self.collective_rpc("load_received", (token, transfers.encode_manifest(policy), self.head))
        return True


async def keep(published: PolicyPublished) -> PolicyPublished:
    return published


@asynccontextmanager
async def open_pair(
    processes: int, said: float, seconds: float = LIMIT_SECONDS
) -> AsyncIterator[tuple[CollectiveSender, EngineReceiver, Engine]]:
    """A learner that was told of ``said`` processes, and an engine that has ``processes``."""
    async with MemoryServer().connect("transfer") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("transfer", lanes=1))
        learner = CollectiveSender(bus, SUBJECTS, policy="p", address="127.0.0.1", seconds=seconds, runtime=Runtime())
        engine = Engine(processes)
        receiver = EngineReceiver(bus, SUBJECTS, engine, policy="p", seconds=seconds)
        assert receiver.processes == processes
        tasks.start_soon(receiver.run)
        async with learner.run():
            await anyio.wait_all_tasks_blocked()
            learner._hear(Heartbeat(role="inference", worker="i", counters={ENGINE_COUNTER: 0.0, PROCESSES_COUNTER: said}))
            yield learner, receiver, engine
        tasks.cancel_scope.cancel()


async def send(learner: CollectiveSender, folder: Path, version: int) -> PolicyPublished:
    watcher = await learner.offer(version, "l")
    assert watcher is not None
    return await anyio.to_thread.run_sync(write_version, folder, version, watcher)


@pytest.mark.parametrize("processes", [1, 3])
async def test_all_processes_of_an_engine_load_every_version(tmp_path: Path, processes: int) -> None:
    async with open_pair(processes, processes) as (learner, receiver, engine):
        for version in range(3):
            published = await send(learner, tmp_path, version)
            assert await receiver.load(published, keep)
            for process in engine.processes:
                assert process.loaded.keys() == build_tensors(version).keys()
                for name, tensor in build_tensors(version).items():
                    assert torch.equal(process.loaded[name], tensor)
            assert not await receiver.load(published, keep)  # given once
            assert not any(process.receptions._receptions for process in engine.processes)


async def test_a_tensor_is_loaded_under_a_second_name(tmp_path: Path) -> None:
    async with open_pair(1, 1) as (learner, receiver, engine):
        engine.head = {"lm_head.weight": "w1"}
        assert await receiver.load(await send(learner, tmp_path, 0), keep)
        assert torch.equal(engine.processes[0].loaded["lm_head.weight"], build_tensors(0)["w1"])


async def test_no_process_loads_a_version_that_one_of_them_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair(2, 1) as (learner, receiver, engine):
        monkeypatch.setattr(engine.processes[1], "begin_reception", lambda *arguments: None)
        assert not await receiver.load(await send(learner, tmp_path, 0), keep)
        assert not any(process.loaded for process in engine.processes)


@pytest.mark.parametrize("index", [0, 1])
async def test_what_differs_from_the_log_in_one_process_is_loaded_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    async with open_pair(2, 2) as (learner, receiver, engine):
        process = engine.processes[index]

        def spoil_and_check(token: str, manifest: bytes) -> str:
            version = process.receptions._receptions[token].version
            assert version is not None and version._parts is not None
            version._parts[0].check.update(memoryview(bytes(4)))
            return WorkerExtension.check_received(process, token, manifest)

        monkeypatch.setattr(process, "check_received", spoil_and_check)
        assert not await receiver.load(await send(learner, tmp_path, 0), keep)
        assert not any(each.loaded for each in engine.processes)


async def test_a_version_of_another_lineage_is_not_loaded(tmp_path: Path) -> None:
    async with open_pair(1, 1) as (learner, receiver, engine):
        published = await send(learner, tmp_path, 0)
        assert not await receiver.load(replace(published, lineage="l2"), keep)
        assert not engine.processes[0].loaded


async def test_an_engine_gives_up_a_version_that_never_becomes_whole_when_the_next_is_offered(tmp_path: Path) -> None:
    async with open_pair(2, 2) as (learner, receiver, engine):
        assert await learner.offer(0, "l") is not None  # and never written
        published = await send(learner, tmp_path, 1)
        with anyio.fail_after(LIMIT_SECONDS):
            while receiver._find(published) is None:  # noqa: ASYNC110 - it waits for the version before to end
                await anyio.sleep(0.01)
        assert await receiver.load(published, keep)
        assert all(len(process.loaded) == 4 for process in engine.processes)


async def test_an_engine_that_never_says_that_it_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(WorkerExtension, "describe_reception", lambda self, token: None)
    offered = WeightsOffered(policy="p", version=0, lineage="l", address="127.0.0.1", port=1, token="t")
    with pytest.raises(TransferFailed, match="does not say"):
        await transfers.receive(Engine(1), offered, limit_bytes=1, seconds=0.05, given_up=threading.Event())


async def test_a_process_that_began_anew_says_that_it_was_not_there() -> None:
    assert Process().describe_reception("t") == "this process was not there"
    assert Process().check_received("t", b"[]") == "this process has not received it"


async def test_a_learner_believes_an_engine_only_so_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "JOIN_SECONDS", 0.05)
    async with open_pair(1, 1e9) as (learner, _, _):
        assert [processes for _, processes in learner._heard.values()] == [MOST_PROCESSES]
