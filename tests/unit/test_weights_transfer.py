"""Versions from learner to engines by collectives: whole and equal to the log's, or not at all, in bounded time."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from msgspec.structs import replace

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.check import check_configuration
from fleetbus.config.settings import Configuration, InferenceSettings, LearnerSettings, WeightsSettings
from fleetbus.config.training_settings import TrainerSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Heartbeat, PolicyPublished, Subjects, WeightsOffered, encode
from fleetbus_workers.replay.learner_replay import configure_lineage
from fleetbus_workers.weights import file
from fleetbus_workers.weights.collective import group, receiver, sender, stream
from fleetbus_workers.weights.collective.received import ReceivedVersion
from fleetbus_workers.weights.collective.receiver import CollectiveReceiver
from fleetbus_workers.weights.collective.sender import CollectiveSender
from fleetbus_workers.weights.collective.written_file import WrittenFile
from fleetbus_workers.weights.file import WeightsRejected, read_weights, stream_weights, write_weights
from fleetbus_workers.weights.transfer import ENGINE_COUNTER, TransferFailed

pytestmark = pytest.mark.anyio

RUN = "transfer"
SUBJECTS = Subjects(RUN)
LIMIT_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 256)
    monkeypatch.setattr(group, "JOIN_SECONDS", 20.0)


def build_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    half = {f"half.{index}": torch.randn(7, 3).to(torch.bfloat16) for index in range(12)}
    return {"steps": torch.arange(5), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), **half, "w": torch.randn(33, 9)}


def build_version(folder: Path, version: int, watcher: WrittenFile | None = None, lineage: str = "l1") -> PolicyPublished:
    file = folder / f"{lineage}-{version}"
    manifest = write_weights(file, build_tensors(version), watcher)
    return PolicyPublished(
        policy="p", version=version, lineage=lineage, step=0, uri=file.as_uri(), manifest=manifest, size_bytes=1
    )


class Taker:
    """A sampler that keeps what it is handed."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, Mapping[str, torch.Tensor]]] = []

    @property
    def max_version_bytes(self) -> int:
        return LIMIT_BYTES

    async def load_tensors(self, policy: PolicyPublished, tensors: Mapping[str, torch.Tensor]) -> None:
        self.loaded.append((policy.version, tensors))


@asynccontextmanager
async def open_pair(
    engines: int = 1, seconds: float = 60.0
) -> AsyncIterator[tuple[Bus, CollectiveSender, list[CollectiveReceiver]]]:
    """A learner's side that has heard of as many engines as there are, and theirs."""
    async with MemoryServer().connect(RUN) as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run(RUN, lanes=1))
        made = CollectiveSender(bus, SUBJECTS, policy="p", address="127.0.0.1", seconds=seconds, runtime=Runtime())
        receivers = [CollectiveReceiver(bus, SUBJECTS, Taker(), policy="p", seconds=seconds) for _ in range(engines)]
        for each in receivers:
            tasks.start_soon(each.run)
        async with made.run():
            await anyio.wait_all_tasks_blocked()
            for index in range(engines):
                made._hear(Heartbeat(role="inference", worker=f"i{index}", counters={ENGINE_COUNTER: 0.0}))
            yield bus, made, receivers
        tasks.cancel_scope.cancel()


def assert_equal(found: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> None:
    assert found is not None and found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


async def test_two_engines_get_every_version_while_it_is_written(tmp_path: Path) -> None:
    async with open_pair(engines=2) as (_, learner, engines):
        for version in range(3):
            watcher = await learner.offer(version, "l1")
            published = await anyio.to_thread.run_sync(build_version, tmp_path, version, watcher)
            for engine in engines:
                assert_equal(await engine.take(published), build_tensors(version))
                assert await engine.take(published) is None  # given once
        await learner._ended.wait()
        assert learner.sent == 3


def test_who_follows_a_file_is_told_of_parts_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "STEP_BYTES", 1000)
    told: list[int] = []

    class Watcher(WrittenFile):
        def advance(self, position: int) -> None:
            assert position <= (written := next(tmp_path.glob(".large.*")).stat().st_size), written
            told.append(position)

    tensors = {"large": torch.arange(1024), "small": torch.ones(3), "empty": torch.zeros(0)}
    manifest = write_weights(tmp_path / "large", tensors, watcher := Watcher())
    watcher.close()
    assert [after - before for before, after in pairwise(told)] == [1000] * 7 + [192, 12]
    assert_equal(read_weights(tmp_path / "large", manifest), tensors)


async def test_what_has_arrived_counts_only_if_the_log_names_its_digests_and_lineage(tmp_path: Path) -> None:
    async with open_pair() as (_, learner, (engine,)):
        for version, change in ((0, {"lineage": "l2"}), (1, {"manifest": build_version(tmp_path, 9).manifest})):
            watcher = await learner.offer(version, "l1")
            published = await anyio.to_thread.run_sync(build_version, tmp_path, version, watcher)
            assert await engine.take(replace(published, **change)) is None


async def test_numbers_that_are_not_finite_never_come_through(tmp_path: Path) -> None:
    async with open_pair() as (_, learner, (engine,)):
        watcher = await learner.offer(0, "l1")
        tensors = {"w": torch.tensor([1.0, float("nan")])}
        manifest = await anyio.to_thread.run_sync(write_weights, tmp_path / "w", tensors, watcher)
        published = PolicyPublished(policy="p", version=0, lineage="l1", step=0, uri="", manifest=manifest, size_bytes=1)
        assert await engine.take(published) is None


async def test_without_an_engine_that_takes_transfers_nothing_is_offered() -> None:
    async with open_pair(engines=0) as (_, learner, _):
        learner._hear(Heartbeat(role="inference", worker="vllm"))
        assert await learner.offer(0, "l1") is None


async def test_an_engine_that_never_comes_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "JOIN_SECONDS", 0.05)
    async with open_pair(engines=0) as (_, learner, _):
        learner._hear(Heartbeat(role="inference", worker="gone", counters={ENGINE_COUNTER: 0.0}))
        watcher = await learner.offer(0, "l1")
        await anyio.to_thread.run_sync(build_version, tmp_path, 0, watcher)
        with anyio.fail_after(10):
            await learner._ended.wait()
        assert learner.sent == 0


async def test_a_version_that_is_never_finished_is_given_up_by_both_sides(tmp_path: Path) -> None:
    def write_half(watcher: WrittenFile) -> None:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(build_tensors().items())[:5]
            raise OSError(28, "no space left")

        layout = [(name, tuple(each.shape), each.dtype) for name, each in build_tensors().items()]
        with pytest.raises(OSError, match="no space"):
            stream_weights(tmp_path / "half", layout, tensors(), watcher)

    async with open_pair() as (_, learner, (engine,)):
        watcher = await learner.offer(0, "l1")
        assert watcher is not None
        await anyio.to_thread.run_sync(write_half, watcher)
        published = await anyio.to_thread.run_sync(build_version, tmp_path, 0, watcher)  # as after a full disk
        with anyio.fail_after(30):
            assert await engine.take(published) is None
        watcher = await learner.offer(1, "l1")
        published = await anyio.to_thread.run_sync(build_version, tmp_path, 1, watcher)
        assert_equal(await engine.take(published), build_tensors(1))


async def test_an_engine_that_stands_still_costs_the_learner_one_second_and_this_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    receive = stream.receive_version

    def stand_still(*arguments: object, **named: object) -> ReceivedVersion:
        go_on.wait(30)
        return receive(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(receiver, "receive_version", stand_still)
    monkeypatch.setattr(sender, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(stream, "PIECE_BYTES", 8 << 20)  # more than sockets take by themselves
    async with open_pair() as (_, learner, (engine,)):
        try:
            watcher = await learner.offer(0, "l1")
            large = {"w": torch.zeros(16 << 20, dtype=torch.uint8)}
            await anyio.to_thread.run_sync(write_weights, tmp_path / "large", large, watcher)  # the writing does not wait
            with anyio.fail_after(5):
                assert await learner.offer(1, "l1") is None
        finally:
            go_on.set()
        with anyio.fail_after(30):
            await learner._ended.wait()
        watcher = await learner.offer(2, "l1")
        published = await anyio.to_thread.run_sync(build_version, tmp_path, 2, watcher)
        with anyio.fail_after(30):
            while engine._find(published) is None:  # noqa: ASYNC110 - it waits for its thread of the version before
                await anyio.sleep(0.01)
        assert_equal(await engine.take(published), build_tensors(2))


async def test_offers_of_nobody_and_malformed_ones_are_told_and_forgotten(tmp_path: Path) -> None:
    offer = WeightsOffered(policy="p", version=0, lineage="l1", address="127.0.0.1", port=1, token="t")
    async with open_pair() as (bus, learner, (engine,)):
        await bus.broadcast(SUBJECTS.transfer("p"), b"nonsense")
        await bus.broadcast(SUBJECTS.transfer("p"), encode(offer))
        await anyio.wait_all_tasks_blocked()
        watcher = await learner.offer(1, "l1")
        published = await anyio.to_thread.run_sync(build_version, tmp_path, 1, watcher)
        assert_equal(await engine.take(published), build_tensors(1))
        assert await engine.take(replace(published, version=0)) is None


async def test_a_version_larger_than_the_model_is_refused_before_it_has_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__import__(__name__, fromlist=["x"]), "LIMIT_BYTES", 100)
    async with open_pair() as (_, learner, (engine,)):
        watcher = await learner.offer(0, "l1")
        published = await anyio.to_thread.run_sync(build_version, tmp_path, 0, watcher)
        assert await engine.take(published) is None


async def test_an_address_of_another_machine_is_refused_in_one_line() -> None:
    async with MemoryServer().connect(RUN) as bus:
        made = CollectiveSender(bus, SUBJECTS, policy="p", address="192.0.2.1", seconds=1, runtime=Runtime())
        with pytest.raises(UserError, match=r"weights.transfer_address = 192.0.2.1: cannot listen there"):
            async with made.run():
                pass


@pytest.mark.parametrize(
    "others",
    [
        {"inference": InferenceSettings(engine="openai", urls="http://127.0.0.1:1")},
        {"learner": LearnerSettings(trainer="tinker")},
        {"inference": InferenceSettings(engine="vllm"), "trainer": TrainerSettings(lora_rank=4, published_weights="adapters")},
    ],
)
def test_the_setting_is_refused_where_it_would_have_no_effect(others: dict[str, Any]) -> None:
    weights = WeightsSettings(transfer="collective")
    for engine in ("torch", "vllm"):
        check_configuration(Configuration(weights=weights, inference=InferenceSettings(engine=engine)))
    with pytest.raises(UserError, match=r"weights.transfer = collective (needs|sends whole models)"):
        check_configuration(Configuration(weights=weights, **others))


def test_a_replayed_learner_opens_no_port() -> None:
    recorded = Configuration(weights=WeightsSettings(transfer="collective", full_every=3))
    context: Any = SimpleNamespace(configuration=recorded)
    lineage: Any = SimpleNamespace(settings=None, is_whole=False)
    weights = configure_lineage(context, recorded, lineage, Path("folder"), trains=True).weights
    assert weights == WeightsSettings(full_every=3)


def build_content(described: object, tail: bytes = b"") -> torch.Tensor:
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    return torch.frombuffer(bytearray(struct.pack("<Q", len(header)) + header + tail), dtype=torch.uint8)


BAD_HEADERS: Iterable[object] = (
    [],
    {"w": 3},
    {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
    {"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
)


@pytest.mark.parametrize("described", BAD_HEADERS)
def test_what_is_no_weights_file_is_refused(described: object) -> None:
    content = build_content(described, b"\0" * 4)
    with pytest.raises(TransferFailed):
        ReceivedVersion(content).advance(len(content))


def test_a_header_that_is_longer_than_the_file_is_refused() -> None:
    content = torch.frombuffer(bytearray(struct.pack("<Q", 1 << 40) + b"{}" * 8), dtype=torch.uint8)
    with pytest.raises(TransferFailed, match="header"):
        ReceivedVersion(content).advance(len(content))


@pytest.mark.parametrize("cut", [1, 8, 100, 777])
def test_digests_do_not_depend_on_how_it_arrives(cut: int, tmp_path: Path) -> None:
    manifest = write_weights(tmp_path / "w", build_tensors())
    content = torch.frombuffer(bytearray((tmp_path / "w").read_bytes()), dtype=torch.uint8)
    version = ReceivedVersion(content)
    for arrived in [*range(0, len(content), 8 * cut), len(content)]:
        version.advance(arrived)
    assert_equal(version.take_tensors("it", manifest), build_tensors())
    unfinished = ReceivedVersion(content)
    unfinished.advance(len(content) - 8)
    with pytest.raises(WeightsRejected, match="sha256"):
        unfinished.take_tensors("it", manifest)


def test_a_file_is_followed_without_holes_whatever_order_its_tensors_come_in(tmp_path: Path) -> None:
    tensors = build_tensors()
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]

    class Follower(WrittenFile):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def advance(self, position: int) -> None:
            super().advance(position)
            self.seen.append(position)
            found = bytearray(position)
            self.read(memoryview(found), 0, 1.0)
            self.prefix = bytes(found)

    follower = Follower()
    stream_weights(tmp_path / "w", layout, reversed(list(tensors.items())), follower)
    assert follower.seen == sorted(follower.seen) and follower.seen[-1] == (tmp_path / "w").stat().st_size
    assert follower.prefix == (tmp_path / "w").read_bytes()
    follower.close()
