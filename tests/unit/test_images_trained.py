"""The embedded engine and the trainer see the same: equal log-probabilities, whatever is kept, shared or packed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.processing import ImageProcessor
from fleetbus_workers.images.reader import ImageMismatch, ImageUnreadable
from fleetbus_workers.inference.base import RequestRefused
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.batches import truncate_sequence
from fleetbus_workers.learner.torch.images import TrainingImages
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.starter.build import find_starter_folder
from tests.support.backends import asyncio_alone
from tests.support.checkpoints import store
from tests.support.trainer_settings import trainer_settings
from tests.support.vision_models import FAMILIES, Opened, ask, make_picture, open_families, play, show

pytestmark = pytest.mark.timeout(300)

CLOSE = 1e-4
EPISODES = 4

anyio_backend = asyncio_alone


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_families(tmp_path_factory.mktemp)


async def play_all(sampler: TorchSampler, processor: ImageProcessor) -> list[TrainingSequence]:
    played: dict[int, TrainingSequence] = {}

    async def one(episode: int) -> None:
        played[episode] = await play(sampler, processor, episode)

    async with anyio.create_task_group() as group:
        for episode in range(EPISODES):
            group.start_soon(one, episode)
    return [played[episode] for episode in range(EPISODES)]


async def sequences(folder: Path, processor: ImageProcessor) -> list[TrainingSequence]:
    sampler = TorchSampler(folder, slots=8, processor=processor)
    async with sampler.run():
        return await play_all(sampler, processor)


def trainer(folder: Path, **settings: Any) -> TorchTrainer:
    return TorchTrainer(folder, settings=trainer_settings(images=True, threads=1, **settings))


def published(file: Path, manifest: Any) -> PolicyPublished:
    return PolicyPublished(
        policy="default", version=1, lineage="l", step=1, uri=str(file), manifest=manifest, size_bytes=file.stat().st_size
    )


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
async def test_sampler_and_trainer_agree_over_turns_with_images(family: str, opened: Opened) -> None:
    folder, processor = opened(family)
    batch = await sequences(folder, processor)
    norms = []
    for settings in ({}, {"share_prefix": False}, {"packing": True, "token_budget": 512}, {"gradient_checkpointing": True}):
        metrics = trainer(folder, **settings).train(batch, version=0, progress=0.0)
        assert metrics["logprob_difference_max"] < CLOSE
        assert metrics["tokens"] == sum(int(sequence.loss_mask.sum()) for sequence in batch)
        norms.append(metrics["grad_norm"])
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-3)


@pytest.mark.integration
async def test_training_changes_the_vision_tower_and_the_engine_takes_it_over(opened: Opened, tmp_path: Path) -> None:
    folder, processor = opened("idefics3")
    sampler = TorchSampler(folder, slots=8, processor=processor)
    learning = trainer(folder, learning_rate=0.01, warmup_steps=1)
    before = {name: tensor.clone() for name, tensor in learning._model.state_dict().items()}
    async with sampler.run():
        learning.train(await play_all(sampler, processor), version=0, progress=0.0)
        changed = {name for name, tensor in learning._model.state_dict().items() if not tensor.equal(before[name])}
        assert {name for name in before if "vision_model.embeddings.patch" in name} <= changed
        file = tmp_path / "1.safetensors"
        await sampler.load(published(file, learning.save_weights(file)))
        again = [
            msgspec.structs.replace(each, versions=np.where(each.loss_mask, 1, -1))
            for each in await play_all(sampler, processor)
        ]
    assert learning.train(again, version=1, progress=0.0)["logprob_difference_max"] < CLOSE
    learning.save_model(tmp_path / "saved")
    assert ImageProcessor(tmp_path / "saved").see("0" * 64, make_picture(1)).ids == processor.see("0" * 64, make_picture(1)).ids
    assert trainer(tmp_path / "saved")._model.state_dict().keys() == before.keys()


@pytest.mark.integration
async def test_a_checkpoint_goes_on_where_it_was_stored(opened: Opened, tmp_path: Path) -> None:
    folder, processor = opened("llava")
    batch = await sequences(folder, processor)
    one, other = trainer(folder), trainer(folder)
    one.train(batch, version=0, progress=0.0)
    one.save_weights(tmp_path / "weights.safetensors")
    store(one, tmp_path / "state")
    other.restore(tmp_path / "state")
    metrics = [each.train(batch, version=0, progress=0.5) for each in (one, other)]
    for name in ("loss", "grad_norm", "kl", "learning_rate"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-6)


async def test_equal_ids_with_other_images_share_nothing(opened: Opened) -> None:
    """A prompt as long as what is kept between episodes, twice with other pictures: each as on an engine of its own."""
    folder, processor = opened("idefics3")

    def asked(seed: int) -> tuple[list[int], tuple[PlacedImage, ...]]:
        ids = list(range(40, 70))
        placed = show(processor, ids, make_picture(seed))
        return [*ids, *range(70, 100)], (placed,)

    async def answered(*seeds: int) -> list[Any]:
        sampler = TorchSampler(folder, slots=4, processor=processor)
        async with sampler.run():
            return [await sampler.generate(ask(*asked(seed), key=f"e{number}")) for number, seed in enumerate(seeds)]

    one, other, again = await answered(1, 2, 1)
    (alone,) = await answered(2)
    assert one.logprobs != other.logprobs
    assert (other.ids, other.logprobs) == (alone.ids, pytest.approx(alone.logprobs, abs=1e-5))
    assert (again.ids, again.logprobs) == (one.ids, pytest.approx(one.logprobs, abs=1e-5))


async def test_the_same_image_in_many_prompts_is_computed_once(opened: Opened) -> None:
    folder, processor = opened("idefics3")
    sampler = TorchSampler(folder, slots=4, processor=processor)
    ids = list(range(40, 70))
    placed = show(processor, ids, make_picture(1))
    async with sampler.run():
        for number in range(3):
            await sampler.generate(ask([*ids, *range(100, 120), 120 + number], (placed,), key=f"e{number}"))
    assert sampler.stats["cached_tokens"] > 2 * len(ids)


async def test_an_image_that_cannot_be_shown_is_refused_and_ends_no_engine(opened: Opened) -> None:
    folder, processor = opened("idefics3")
    sampler, blind = TorchSampler(folder, processor=processor), TorchSampler(find_starter_folder())
    placed = show(processor, ids := [40, 41], make_picture(1))
    ids.append(42)
    wrong = msgspec.structs.replace(placed, start=placed.start - 1, stop=placed.stop - 1)
    async with sampler.run(), blind.run():
        with pytest.raises(RequestRefused, match="engine and learner need the same model folder"):
            await sampler.generate(ask(ids, (wrong,)))
        with pytest.raises(RequestRefused, match="reads text only"):
            await blind.generate(ask(ids, (placed,)))
        assert (await sampler.generate(ask(ids, (placed,)))).ids


async def test_a_sampled_image_token_is_a_token_like_any_other(opened: Opened) -> None:
    folder, processor = opened("idefics3")
    (sequence, *_) = await sequences(folder, processor)
    ids = sequence.ids.copy()
    ids[np.flatnonzero(sequence.loss_mask)[:2]] = processor.image_token_id
    metrics = trainer(folder).train([msgspec.structs.replace(sequence, ids=ids)], version=0, progress=0.0)
    assert np.isfinite(metrics["loss"])


async def test_a_cut_never_goes_through_an_image(opened: Opened) -> None:
    folder, processor = opened("idefics3")
    (sequence, *_) = await sequences(folder, processor)
    second = sequence.images[1]
    shorter = truncate_sequence(sequence, second.start + 3)
    assert (len(shorter.ids), shorter.images) == (second.start, sequence.images[:1])
    assert len(truncate_sequence(sequence, second.stop).images) == 2
    metrics = trainer(folder, max_tokens=second.start + 3).train([sequence], version=0, progress=0.0)
    assert metrics["logprob_difference_max"] < CLOSE


async def test_a_trainer_that_sees_nothing_does_not_train_blindly(opened: Opened) -> None:
    batch = await sequences(*opened("idefics3"))
    with pytest.raises(UserError, match="this trainer reads text only"):
        TorchTrainer(find_starter_folder()).train(batch, version=0, progress=0.0)


async def test_a_trainer_says_which_images_are_not_what_the_engine_saw(opened: Opened) -> None:
    folder, processor = opened("idefics3")
    (sequence, *_) = await sequences(folder, processor)
    learning = trainer(folder)
    learning.check_images("e", sequence.ids, sequence.images)
    ids = sequence.ids.copy()
    ids[sequence.images[0].start] += 1
    with pytest.raises(ImageMismatch, match="engine and learner need the same model folder"):
        learning.check_images("e", ids, sequence.images)
    text = msgspec.structs.replace(sequence.images[0], object="1" * 64, data=b"no image")
    with pytest.raises(ImageUnreadable, match="cannot be read"):
        learning.check_images("e", sequence.ids, (text,))
    with pytest.raises(ImageMismatch, match="this trainer reads text only"):
        TorchTrainer(find_starter_folder()).check_images("e", sequence.ids, sequence.images)


def test_several_processes_are_refused_by_name(opened: Opened) -> None:
    folder, _ = opened("llava")
    with pytest.raises(UserError, match="training on images supports one process"):
        TrainingImages(folder, None, processes=2)


@pytest.mark.integration
def test_a_model_that_sees_says_how_it_is_trained(opened: Opened) -> None:
    folder, _ = opened("llava")
    for open_text in (lambda: TorchTrainer(folder), lambda: TorchSampler(folder)):
        with pytest.raises(UserError, match=r"image-text model: set environment\.images = true"):
            open_text()
