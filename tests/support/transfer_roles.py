"""Two trainer processes of one model, and engines, as processes that end themselves at a named point of a transfer.

Made for a fork server that has imported this: a process then begins in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import structlog
import torch

from fleetbus.bus.nats import connect
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings, WeightsSettings
from fleetbus.delivery import worker_lifecycle
from fleetbus_schemas import LineageStarted, PolicyPublished, Subjects
from fleetbus_workers.inference.torch.sampler import TorchSampler
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.base import SavesWeights
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.torch import sharding
from fleetbus_workers.learner.torch.distributed import LeaderTrainer, run_follower
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.weights.collective import group, receiver, sender, stream
from fleetbus_workers.weights.collective.receiver import CollectiveReceiver
from fleetbus_workers.weights.collective.sender import CollectiveSender
from fleetbus_workers.weights.file import view_bytes
from fleetbus_workers.weights.transfer_choice import open_receiver, open_sender
from tests.support.rule_policy import RuleTemplate

RUN = "transfers"
SUBJECTS = Subjects(RUN)
PIECE_BYTES = 8 << 10
STEPS_SECONDS = 2.0
"""Of a group whose peer stands still; a killed one is noticed at once."""

LEARNER_POINTS = (
    "offered", "gathered", "piece 0", "piece 1", "piece 2", "piece 6", "sent", "written", "announced", "follower gathers",
)  # fmt: skip
ENGINE_POINTS = (
    "heard", "joined", "piece 0", "piece 1", "piece 2", "piece 4", "piece 6", "received", "taken", "swapped",
)  # fmt: skip

CONFIGURATION = Configuration(
    run=RunSettings(name=RUN),
    inference=InferenceSettings(slots=2),
    weights=WeightsSettings(transfer="collective", transfer_seconds=20.0),
)


def hash_tensors(hashes: Mapping[str, str]) -> str:
    """One digest of the digests of all tensors by name."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(owner: Any, name: str, *, before: bool = False, when: Callable[[object], bool] = lambda found: True) -> None:
    """Let a function or method, or coroutine, of ``owner`` end this process when it is called or has returned."""
    plain = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if before:
            die()
        found = plain(*arguments, **named)
        if hasattr(found, "__await__"):
            return wait(found)
        if when(found):
            die()
        return found

    async def wait(found: Any) -> Any:
        result = await found
        if when(result):
            die()
        return result

    setattr(owner, name, call)


def die_at_piece(number: int) -> None:
    """The size is sent first."""
    plain, count = group.Group.broadcast, [-1]

    def broadcast(self: group.Group, content: torch.Tensor) -> Callable[[], None]:
        if count[0] == number:
            die()
        count[0] += 1
        return plain(self, content)

    group.Group.broadcast = broadcast  # type: ignore[method-assign]


def set_up(point: str) -> None:
    warnings.simplefilter("ignore")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    torch.set_num_threads(1)
    stream.PIECE_BYTES = PIECE_BYTES
    worker_lifecycle.HEARTBEAT_SECONDS = 0.2  # type: ignore[attr-defined]
    for module in (group, stream):
        module.STALL_SECONDS = STEPS_SECONDS  # type: ignore[attr-defined]
    sharding.LAST_WORDS_SECONDS = 0.1
    if point.startswith("piece "):
        die_at_piece(int(point.removeprefix("piece ")))


def run_trainer(rank: int, port: int, url: str, model: Path, out: Path, lineage: int, engines: int, point: str) -> None:
    """One of two trainer processes; the leader begins a lineage, publishes one version, and ends when it is sent."""
    leads = rank == 0
    set_up(point if leads else "")
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    if point == "follower gathers" and not leads:
        die_after(sharding.Shards, "gather_to_leader")
    trainer = TorchTrainer(model)
    with torch.no_grad():
        for parameter in trainer._model.parameters():
            parameter.mul_(1 + 0.01 * lineage)
    if not leads:
        with suppress(RuntimeError):  # the leader was killed
            run_follower(trainer)
        return
    points = {"offered": (CollectiveSender, "offer"), "gathered": (group.Rendezvous, "gather"),
              "sent": (sender, "send_version"), "written": (LeaderTrainer, "save_weights"),
              "announced": (Publication, "publish")}  # fmt: skip
    if point in points:
        die_after(*points[point])
    leading = LeaderTrainer(trainer)
    anyio.run(publish_one, leading, url, out, lineage, engines)
    leading.close()


@asynccontextmanager
async def transferring(
    trainer: SavesWeights, url: str, out: Path, lineage: int, configuration: Configuration, *, engines: int, seconds: float
) -> AsyncIterator[tuple[Publication, CollectiveSender]]:
    """The versions of a new lineage and their sender, once it heard of so many engines."""
    run = configuration.run.name
    async with connect(url, run=run) as bus:
        made = open_sender(bus, Subjects(run), configuration, Runtime())
        assert isinstance(made, CollectiveSender)
        publication = Publication(
            bus, Subjects(run), trainer, policy="default", lineage=f"l{lineage}", folder=out, keep=100, runtime=Runtime(),
            sender=made,
        )  # fmt: skip
        await publication.fence(LineageStarted(lineage=f"l{lineage}", worker="learner"))
        async with publication.run():
            with anyio.fail_after(seconds):
                while len(made._heard) < engines:  # noqa: ASYNC110 - heartbeats are no event of the sender's
                    await anyio.sleep(0.02)
            yield publication, made


async def publish_one(trainer: LeaderTrainer, url: str, out: Path, lineage: int, engines: int) -> None:
    async with transferring(trainer, url, out, lineage, CONFIGURATION, engines=engines, seconds=30) as (publication, made):
        started = anyio.current_time()
        await publication.publish(lineage)
        (out / f"seconds-{lineage}").write_text(f"{anyio.current_time() - started}")
        await made._ended.wait()


class NotingSampler(TorchSampler):
    """Notes each version that it samples from by the digest of the weights that it computes with."""

    def __init__(self, model: Path, notes: Path) -> None:
        super().__init__(model, slots=2, max_model_len=32, fused=False)
        self._notes = notes

    async def load(self, policy: PolicyPublished) -> None:
        await super().load(policy)
        self.note(policy, "file")

    async def load_tensors(self, policy: PolicyPublished, tensors: Mapping[str, torch.Tensor]) -> None:
        await super().load_tensors(policy, tensors)
        self.note(policy, "transfer")

    def note(self, policy: PolicyPublished, way: str) -> None:
        parameters = self._runner._parameters  # type: ignore[attr-defined]
        hashes = {name: hashlib.sha256(view_bytes(tensor)).hexdigest() for name, tensor in parameters.items()}
        with self._notes.open("a") as notes:
            notes.write(json.dumps({"version": policy.version, "digest": hash_tensors(hashes), "way": way}) + "\n")


def run_engine(name: str, url: str, model: Path, notes: Path, point: str) -> None:
    """An inference worker, until it is killed."""
    set_up(point)
    if point in ("heard", "joined"):
        die_after(receiver, "join", before=point == "heard")
    points = {"received": (receiver, "receive_version"), "taken": (CollectiveReceiver, "take"),
              "swapped": (NotingSampler, "load_tensors")}  # fmt: skip
    if point in points:
        die_after(*points[point], when=lambda found: found is not None or point == "swapped")
    anyio.run(serve_engine, name, url, model, notes)


async def serve_engine(name: str, url: str, model: Path, notes: Path) -> None:
    sampler = NotingSampler(model, notes)
    async with connect(url, run=RUN) as bus:
        await run_inference(
            bus,
            configuration=CONFIGURATION,
            name=name,
            drain=anyio.Event(),
            sampler=sampler,
            template=RuleTemplate(),
            receiver=open_receiver(bus, CONFIGURATION, sampler, None),
        )
