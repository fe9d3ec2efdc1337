"""Versions that a real vLLM engine's own process receives from a learner, under load, while learner and engine are killed:
every token is of the weights that the log has for its version. `just test-vllm`; its figures are those of decision 0269."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.delivery import worker_lifecycle
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.vllm.engine import EngineSettings
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.weights.transfer_choice import open_receiver
from tests.support.rule_policy import RuleTemplate
from tests.support.vllm_engine import CLOSE, LENGTH, LIMIT_SECONDS, MARKS, build_request, generate_all

pytestmark = MARKS

TOKENS = 60
ANNOUNCED = {"dies when it has written": {0}, "dies when it has announced": {1}}
"""How many versions more the log has then; the file is written, and may be announced, while the last pieces are sent."""


class Fleet:
    """One engine that samples all the time, and learners that come and go."""

    def __init__(self, folder: Path, url: str, bus: Bus, sampler: Any) -> None:
        from tests.support import vllm_transfer

        self.roles = vllm_transfer
        self.bus, self.sampler = bus, sampler
        self.out = folder / "weights"
        self.out.mkdir()
        self.turns: list[tuple[GenerationRequest, Generation]] = []
        self.ways: dict[int, str] = {}
        self._arguments = (url, folder / "model", self.out)
        self._context = multiprocessing.get_context("spawn")
        self._learner: BaseProcess | None = None
        self._lineage = 0
        self._changed = anyio.Event()
        for method, way in (("load", "file"), ("load_received", "transfer")):
            self._note_loads(method, way)

    def _note_loads(self, method: str, way: str) -> None:
        plain = getattr(self.sampler, method)

        async def load(*arguments: Any) -> Any:
            found = await plain(*arguments)
            if found is not False:
                self.ways[self.sampler.version] = way
                self._changed.set()
                self._changed = anyio.Event()
            return found

        setattr(self.sampler, method, load)

    async def sample(self) -> None:
        """Turns, one after another in four places, until cancelled."""
        seed = 0
        while True:
            requests = [build_request(seed + place, tokens=TOKENS, stops=frozenset()) for place in range(4)]
            self.turns += zip(requests, await generate_all(self.sampler, requests), strict=True)
            seed += len(requests)

    def start_learner(self, point: str = "", versions: int = 1) -> None:
        self._lineage += 1
        arguments = (*self._arguments, self._lineage, versions, point)
        self._learner = self._context.Process(target=self.roles.run_learner, args=arguments)
        self._learner.start()

    async def end_learner(self) -> int | None:
        """Its exit code."""
        learner = self._learner
        assert learner is not None
        await anyio.to_thread.run_sync(learner.join, LIMIT_SECONDS)
        return learner.exitcode

    def kill_learner(self) -> None:
        if self._learner is not None:
            self._learner.kill()
            self._learner.join(10)

    async def wait_for(self, version: int) -> str:
        """The way that it came."""
        with anyio.fail_after(LIMIT_SECONDS):
            while version not in self.ways:
                await self._changed.wait()
        return self.ways[version]

    async def wait_for_file(self, name: str) -> None:
        with anyio.fail_after(LIMIT_SECONDS):
            while not (self.out / name).exists():  # noqa: ASYNC110 - another process makes it
                await anyio.sleep(0.01)

    def kill_engine(self) -> None:
        """All processes of vLLM."""
        for child in psutil.Process().children(recursive=True):
            owner = self._learner.pid if self._learner is not None else None
            said = " ".join(child.cmdline())
            if child.pid != owner and "resource_tracker" not in said and "nats-server" not in said:
                os.kill(child.pid, signal.SIGKILL)

    async def read_log(self) -> dict[int, PolicyPublished]:
        entries = [entry async for entry in self.bus.scan([self.roles.SUBJECTS.policy("default")])]
        return {each.version: each for _, each in decode_entries(PolicyPublished, entries, beside=(LineageStarted,))}

    async def measure_differences(self) -> dict[int, float]:
        """By version the largest, over all tokens of it, between the engine's log-probabilities and transformers' with the
        file that the log names."""
        log, found = await self.read_log(), dict.fromkeys(self.ways, 0.0)
        for version in found:
            model = await anyio.to_thread.run_sync(load_model, self._arguments[1], log[version])
            for request, generation in self.turns:
                for span in generation.versions:
                    if span.version == version:
                        found[version] = max(found[version], measure(model, request, generation, span.start, span.stop))
        return found


def load_model(folder: Path, policy: PolicyPublished) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from fleetbus_workers.weights.file import read_weights

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert not model.load_state_dict(read_weights(policy.uri, policy.manifest), strict=False).unexpected_keys
    return model


def measure(model: Any, request: GenerationRequest, generation: Generation, start: int, stop: int) -> float:
    import torch

    with torch.no_grad():
        values = model(torch.tensor([[*request.ids, *generation.ids]])).logits[0].log_softmax(-1)
    offset = len(request.ids) - 1
    return max(
        abs(float(values[offset + place, generation.ids[place]]) - generation.logprobs[place]) for place in range(start, stop)
    )


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    from fleetbus_workers.inference.vllm import VllmSampler
    from tests.support import vllm_transfer as roles

    monkeypatch.setattr(worker_lifecycle, "HEARTBEAT_SECONDS", 0.2)
    await anyio.to_thread.run_sync(roles.make_tied_model, tmp_path / "model")
    settings = EngineSettings(folder=tmp_path / "model", slots=8, max_model_len=LENGTH, kv_cache_mib=64)
    sampler = await anyio.to_thread.run_sync(lambda: VllmSampler(settings, place=tmp_path / "served"))
    async with (
        run_server(tmp_path / "store", ends_with_parent=True) as server,
        connect(server.url, run=roles.RUN) as bus,
        anyio.create_task_group() as tasks,
    ):
        await bus.declare(plan_run(roles.RUN, lanes=16))
        made, drain = Fleet(tmp_path, server.url, bus, sampler), anyio.Event()

        async def work() -> None:
            await run_inference(
                bus, configuration=roles.CONFIGURATION, name="engine", drain=drain, sampler=sampler,
                template=RuleTemplate(), receiver=open_receiver(bus, roles.CONFIGURATION, sampler, None),
            )  # fmt: skip

        tasks.start_soon(work)
        await sampler._alive.wait()
        tasks.start_soon(made.sample)
        try:
            yield made
        finally:
            made.kill_learner()
            tasks.cancel_scope.cancel()


async def expect_sound(fleet: Fleet, said: str) -> None:
    differences = await fleet.measure_differences()
    tokens = sum(len(generation.ids) for _, generation in fleet.turns)
    ways = ", ".join(f"{version} by {way}" for version, way in sorted(fleet.ways.items()))
    print(f"{said}: {len(fleet.turns)} turns, {tokens} tokens; versions {ways}; log-probabilities differ by up to "
          f"{max(differences.values()):.2g}; restarts {fleet.sampler.stats['engine_restarts']:.0f}")  # fmt: skip
    assert max(differences.values()) < CLOSE


async def test_a_vllm_engine_receives_every_version_while_it_samples(fleet: Fleet) -> None:
    fleet.start_learner(versions=4)
    assert await fleet.end_learner() == 0
    assert [await fleet.wait_for(version) for version in range(4)] == ["transfer"] * 4
    await expect_sound(fleet, "nobody killed")


async def test_a_learner_that_dies_in_a_transfer_leaves_the_engine_at_its_version(fleet: Fleet) -> None:
    fleet.start_learner()
    assert await fleet.end_learner() == 0 and await fleet.wait_for(0) == "transfer"
    newest = 0
    for point in ("dies at piece 0", "dies at piece 2", "dies at piece 4", "dies when it has sent", *ANNOUNCED):
        fleet.start_learner(point)
        assert await fleet.end_learner() == -signal.SIGKILL
        known = max(await fleet.read_log())
        assert known - newest in ANNOUNCED.get(point, {0, 1}), point
        if known > newest:
            await fleet.wait_for(known)
        fleet.start_learner()
        assert await fleet.end_learner() == 0
        newest = max(await fleet.read_log())
        assert await fleet.wait_for(newest) == "transfer", point
    assert fleet.sampler.stats["engine_restarts"] == 0
    await expect_sound(fleet, "six learners killed")


async def test_an_engine_that_is_killed_in_a_transfer_comes_back_with_the_version_of_the_log(fleet: Fleet) -> None:
    fleet.start_learner()
    assert await fleet.end_learner() == 0 and await fleet.wait_for(0) == "transfer"
    for kill, point in enumerate(("holds at piece 0", "holds at piece 2", "holds at piece 4"), 1):
        fleet.start_learner(point)
        await fleet.wait_for_file("held")
        await anyio.to_thread.run_sync(fleet.kill_engine)
        (fleet.out / "go").touch()
        assert await fleet.end_learner() == 0
        assert await fleet.wait_for(max(await fleet.read_log())) == "file", point
        assert fleet.sampler.stats["engine_restarts"] == kill
        for name in ("held", "go"):
            (fleet.out / name).unlink()
        fleet.start_learner()
        assert await fleet.end_learner() == 0
        assert await fleet.wait_for(max(await fleet.read_log())) == "transfer", point
    await expect_sound(fleet, "an engine killed three times while it received")


async def test_an_engine_that_is_killed_after_it_took_a_version_fetches_its_file(fleet: Fleet) -> None:
    fleet.start_learner(versions=2)
    assert await fleet.end_learner() == 0 and await fleet.wait_for(1) == "transfer"
    assert not any(each.name.startswith("v") for each in fleet.sampler._weights._place.iterdir())
    turns = len(fleet.turns)
    await anyio.to_thread.run_sync(fleet.kill_engine)
    with anyio.fail_after(LIMIT_SECONDS):
        while len(fleet.turns) < turns + 12:  # noqa: ASYNC110 - of a list
            await anyio.sleep(0.05)
    assert fleet.sampler.stats["engine_restarts"] == 1 and fleet.sampler.version == 1
    assert {span.version for _, generation in fleet.turns[-4:] for span in generation.versions} == {1}
    await expect_sound(fleet, "an engine killed between versions")


async def test_an_engine_does_not_take_what_differs_by_one_bit_from_the_log(fleet: Fleet) -> None:
    fleet.start_learner("lies at piece 3", versions=2)
    assert await fleet.end_learner() == 0
    assert [await fleet.wait_for(version) for version in range(2)] == ["transfer", "file"]
    await expect_sound(fleet, "a learner that lies")
