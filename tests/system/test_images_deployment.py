"""Episodes with pictures over a real server: by reference through the log, seen alike by every engine and by the trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, InferenceSettings, NatsSettings, RunSettings
from fleetbus.core.training.groups import Group
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus_schemas import (
    Action,
    EpisodeFinished,
    EpisodeRequested,
    Image,
    PolicyPublished,
    SamplingSettings,
    Subjects,
    Task,
    encode,
)
from fleetbus_workers.environment.adapters.colours import ColoursEnvironment
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage
from fleetbus_workers.environment.images.store import build_run_image_store
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.images.processing import ImageProcessor
from fleetbus_workers.images.reader import image_reader
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.image_prompts import ImagePrompts
from fleetbus_workers.inference.image_template import ImageTemplate
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.starter.build import find_starter_folder
from fleetbus_workers.weights.store import get_image_store
from tests.support.servers import connect, run_server
from tests.support.trainer_settings import trainer_settings
from tests.support.vision_models import write_vision_model

RUN = "seen"
SUBJECTS = Subjects(RUN)
CONFIGURATION = Configuration(
    run=RunSettings(name=RUN), nats=NatsSettings(lanes=2, max_bytes=1 << 26), inference=InferenceSettings(slots=8)
)
TURNS = 3
CLOSE = 1e-4
SECONDS = 100

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("seeing"))


class Fleet:
    """One environment worker, and engines that a test starts and stops."""

    def __init__(self, url: str, bus: Bus, folder: Path) -> None:
        self.url, self.bus, self.folder = url, bus, folder
        self.drain = anyio.Event()

    async def environment(self, store_image: Callable[[Bus], StoreImage | None]) -> None:
        async with connect(self.url, run=RUN, worker="environment-0") as bus:
            kept = store_image(bus)
            make = lambda: ColoursEnvironment(TURNS, store_image=kept)  # noqa: E731
            await run_environment(bus, configuration=CONFIGURATION, name="environment-0", drain=self.drain, make=make)

    async def inference(self, name: str, kind: type[TorchSampler] | None = None, *, shows: bool = True) -> None:
        processor = ImageProcessor(self.folder)
        async with connect(self.url, run=RUN, worker=name) as bus:
            await run_inference(
                bus,
                configuration=CONFIGURATION,
                name=name,
                drain=self.drain,
                sampler=(kind or Announced)(self.folder, processor=processor),
                template=ImageTemplate(self.folder, processor),
                images=ImagePrompts(processor, image_reader(bus, RUN)) if shows else None,
            )

    async def text_inference(self) -> None:
        async with connect(self.url, run=RUN, worker="inference-text") as bus:
            sampler, template = Announced(find_starter_folder()), ChatTemplate(find_starter_folder())
            await run_inference(
                bus, configuration=CONFIGURATION, name="inference-text", drain=self.drain, sampler=sampler, template=template
            )

    async def ask(self, *episodes: str) -> None:
        for number, episode in enumerate(episodes):
            request = EpisodeRequested(
                episode_id=episode,
                group_id="g",
                sample_index=number,
                split="train",
                task=Task(key="colours", seed=number),
                policy="default",
                sampling=SamplingSettings(max_tokens=5, seed=number),
                deadline_ns=self.bus.now_ns() + int(300e9),
            )
            await self.bus.publish(SUBJECTS.task("default", episode), encode(request), expected_last=0)

    async def results(self, count: int) -> dict[str, EpisodeFinished]:
        found: dict[str, EpisodeFinished] = {}
        async with self.bus.read([SUBJECTS.episodes]) as reader:
            while len(found) < count:
                entry = decode_episode_entry(await reader.receive())
                if isinstance(entry, EpisodeFinished):
                    found[entry.episode_id] = entry
        return found

    async def actions(self, result: EpisodeFinished) -> list[Action]:
        lanes = {reference.lane for reference in result.actions}
        entries = await self.bus.history([SUBJECTS.action(lane, result.episode_id) for lane in lanes])
        return [action for _, action in decode_entries(Action, entries)]


class Announced(TorchSampler):
    """A sampler that takes any published version for its own weights."""

    async def load(self, policy: PolicyPublished) -> None:
        self.version = policy.version


@asynccontextmanager
async def fleet(
    place: Path, folder: Path, store_image: Callable[[Bus], StoreImage | None], *engines: Callable[[Fleet], Awaitable[None]]
) -> AsyncIterator[Fleet]:
    with anyio.fail_after(SECONDS):
        async with run_server(place / "nats") as server, connect(server.url, run=RUN, worker="test") as bus:
            await bus.declare(plan_run(RUN, lanes=2, max_bytes=1 << 26))
            published = PolicyPublished(policy="default", version=0, lineage="l", step=0, uri="", manifest=(), size_bytes=0)
            await bus.publish(SUBJECTS.policy("default"), encode(published))
            made = Fleet(server.url, bus, folder)
            async with anyio.create_task_group() as group:
                group.start_soon(made.environment, store_image)
                for engine in engines:
                    group.start_soon(engine, made)  # type: ignore[arg-type]
                yield made
                made.drain.set()


def stored(bus: Bus) -> StoreImage | None:
    return build_run_image_store(bus, CONFIGURATION)


async def first(fleet: Fleet) -> None:
    await fleet.inference("inference-0")


async def trained(fleet: Fleet, results: list[EpisodeFinished], group: Group | None = None) -> list[float]:
    """The largest difference of log-probabilities between engine and trainer, over all tokens of these episodes."""
    group = group or Group(group_id="g", size=len(results), results={result.episode_id: result for result in results})
    sequences = await read_sequences(
        fleet.bus, SUBJECTS, [group], plan=CreditPlan(), temperature=1.0, images=image_reader(fleet.bus, RUN)
    )
    for sequence in sequences:
        assert len(sequence.images) == TURNS
        assert not any(sequence.loss_mask[image.start : image.stop].any() for image in sequence.images)
    trainer = await anyio.to_thread.run_sync(
        lambda: TorchTrainer(fleet.folder, settings=trainer_settings(images=True, threads=1))
    )
    metrics = await anyio.to_thread.run_sync(lambda: trainer.train(sequences, version=0, progress=0.0))
    assert metrics["tokens"] > 0
    return [len(sequences), metrics["logprob_difference_max"]]


@pytest.mark.integration
async def test_pictures_are_seen_alike_by_engine_and_trainer(tmp_path: Path, folder: Path) -> None:
    episodes = [f"e{number}" for number in range(4)]
    async with fleet(tmp_path, folder, stored, first) as made:
        await made.ask(*episodes)
        results = await made.results(len(episodes))
        assert {result.outcome for result in results.values()} == {"completed"}
        for result in results.values():
            assert [len(action.images) for action in await made.actions(result)] == [1] * TURNS
        count, difference = await trained(made, list(results.values()))
    assert (count, difference < CLOSE) == (len(episodes), True)


@pytest.mark.integration
async def test_another_engine_goes_on_with_what_the_log_says_was_seen(tmp_path: Path, folder: Path) -> None:
    """The engine that answered the first turn is gone; its successor rebuilds tokens and pictures."""
    killed, stuck = anyio.CancelScope(), anyio.Event()

    class OneTurn(Announced):
        answered = 0

        async def generate(self, request: GenerationRequest) -> Generation:
            if OneTurn.answered:
                stuck.set()
                await anyio.sleep_forever()
            OneTurn.answered += 1
            return await super().generate(request)

    async def doomed(fleet: Fleet) -> None:
        with killed:
            await fleet.inference("inference-0", OneTurn)

    async def successor(fleet: Fleet) -> None:
        await stuck.wait()
        killed.cancel()
        await fleet.inference("inference-1")

    async with fleet(tmp_path, folder, stored, doomed, successor) as made:
        await made.ask("e0")
        results = await made.results(1)
        workers = [action.worker for action in await made.actions(results["e0"])]
        assert (results["e0"].outcome, workers) == ("completed", ["inference-0", "inference-1", "inference-1"])
        _, difference = await trained(made, list(results.values()))
    assert difference < CLOSE


async def test_a_worker_that_shows_no_images_never_answers_blindly(tmp_path: Path, folder: Path) -> None:
    async def blind(fleet: Fleet) -> None:
        await fleet.inference("inference-0", shows=False)

    async with fleet(tmp_path, folder, stored, blind) as made:
        await made.ask("e0")
        result = (await made.results(1))["e0"]
    assert (result.outcome, result.error_class) == ("lost", "engine_refused")
    assert "reads text only" in result.error


async def test_a_missing_picture_is_how_its_episode_ends_and_nobody_elses(tmp_path: Path, folder: Path) -> None:
    def forgetful(bus: Bus) -> StoreImage:
        store_image = build_run_image_store(bus, CONFIGURATION)
        assert store_image is not None
        made: list[str] = []

        async def kept(picture: EncodedImage) -> Image:
            made.append("one")
            return Image(object="0" * 64) if len(made) == 1 else await store_image(picture)

        return kept

    async with fleet(tmp_path, folder, forgetful, first) as made:
        await made.ask("e0", "e1", "e2")
        results = list((await made.results(3)).values())
    assert sorted((result.outcome, result.error_class) for result in results) == [
        ("completed", ""), ("completed", ""), ("lost", "image_missing"),
    ]  # fmt: skip


async def test_a_picture_that_is_gone_before_training_excludes_its_episode(tmp_path: Path, folder: Path) -> None:
    async with fleet(tmp_path, folder, stored, first) as made:
        await made.ask("e0", "e1", "e2")
        results = await made.results(3)
        objects = get_image_store(made.bus, RUN)
        assert objects is not None
        await objects.remove((await made.actions(results["e1"]))[0].images[0].object)
        group = Group(group_id="g", size=3, results=dict(results))
        count, difference = await trained(made, [], group)
    assert (count, difference < CLOSE) == (2, True)
    assert [(one.episode_id, one.reason) for one in group.excluded] == [("e1", "image_missing")]


async def test_a_picture_that_a_text_model_is_shown_is_a_recorded_outcome(tmp_path: Path, folder: Path) -> None:
    async with fleet(tmp_path, folder, stored, Fleet.text_inference) as made:
        await made.ask("e0")
        result = (await made.results(1))["e0"]
    assert (result.outcome, result.error_class) == ("lost", "template_failed")
    assert "reads text only" in result.error
