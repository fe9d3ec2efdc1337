"""Images by their hash: what a bucket has is checked and kept within bounds, what it lacks is told apart from what is late."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from fleetbus.concurrency.runtime import Runtime
from fleetbus.core.training.groups import Group
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import Action, ActionReference, EpisodeFinished, ShownImage
from fleetbus_schemas.tokens import pack_ids
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.reader import (
    ImageFailed,
    ImageMismatch,
    ImageMissing,
    ImageNotFetched,
    ImageReader,
    ImageUnreadable,
)
from fleetbus_workers.learner import images as learner_images
from fleetbus_workers.learner.images import exclude_mismatched, list_images, read_images
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.bucket import Bucket

DATA = [bytes([number]) * 100 for number in range(4)]
NAMES = [hashlib.sha256(data).hexdigest() for data in DATA]


def bucket() -> Bucket:
    return Bucket(dict(zip(NAMES, DATA, strict=True)))


async def test_an_image_is_fetched_once_and_kept() -> None:
    reader = ImageReader(objects := bucket())
    assert [await reader.read(NAMES[0]) for _ in range(3)] == [DATA[0]] * 3
    assert objects.gets == 1


async def test_what_is_kept_is_bounded_and_the_longest_unused_goes_first() -> None:
    reader = ImageReader(objects := bucket(), cache_bytes=250)
    for number in (0, 1, 0, 2, 0):
        await reader.read(NAMES[number])
    assert objects.gets == 3
    await reader.read(NAMES[1])
    assert objects.gets == 4


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64, NAMES[0] + "\n", NAMES[0][:63]])
async def test_a_name_that_is_no_hash_never_reaches_the_bucket(name: str) -> None:
    reader = ImageReader(objects := bucket())
    with pytest.raises(ImageMissing, match="no SHA-256"):
        await reader.read(name)
    assert objects.gets == 0


async def test_an_image_that_is_gone_or_is_another_one_is_missing_for_ever() -> None:
    reader = ImageReader(Bucket({NAMES[0]: DATA[1]}))
    with pytest.raises(ImageMissing, match="another hash"):
        await reader.read(NAMES[0])
    with pytest.raises(ImageMissing, match="not in the bucket"):
        await reader.read(NAMES[1])
    with pytest.raises(ImageMissing, match="stores no objects"):
        await ImageReader(None).read(NAMES[1])


async def test_a_bucket_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    (objects := bucket()).wait = anyio.sleep_forever
    with pytest.raises(ImageNotFetched, match=r"not fetched within 0\.01 s"):
        await ImageReader(objects, fetch_seconds=0.01).read(NAMES[0])


async def test_a_bus_that_fails_leaves_the_image_to_a_later_try() -> None:
    reader = ImageReader(objects := bucket())
    objects.failure = BusError("cut\noff")
    with pytest.raises(ImageNotFetched, match="cut off"):
        await reader.read(NAMES[0])
    objects.failure = None
    assert await reader.read(NAMES[0]) == DATA[0]


def played(*objects: str) -> list[Action]:
    """Turns of three prompt ids, the last of which shows an image, and two sampled ones."""
    return [
        Action(
            episode_id="e",
            attempt=1,
            turn=turn,
            text="",
            prompt_delta=pack_ids([1, 2, 3]),
            sampled=pack_ids([4, 5]),
            images=(ShownImage(object=name, start=2, stop=3),),
        )
        for turn, name in enumerate(objects)
    ]


def group_of(*episodes: str) -> Group:
    group = Group(group_id="g", size=len(episodes))
    for episode in episodes:
        group.add(
            EpisodeFinished(
                episode_id=episode,
                group_id="g",
                attempt=1,
                outcome="completed",
                worker="w",
                reward=1.0,
                actions=(ActionReference(sequence=1, lane="e0", turn=0),),
            )
        )
    return group


def test_images_stand_where_their_tokens_stand_in_the_whole_episode() -> None:
    assert [(image.start, image.stop) for image in list_images(played(*NAMES[:3]))] == [(2, 3), (7, 8), (12, 13)]


async def test_an_episode_whose_image_is_gone_leaves_its_group_with_that_reason() -> None:
    group = group_of("a", "b", "c")
    plain = Action(episode_id="c", attempt=1, turn=0, text="")
    actions = {"a": played(NAMES[0], NAMES[1]), "b": played(NAMES[0], "f" * 64), "c": [plain]}
    found = await read_images(ImageReader(bucket()), [group], actions)
    assert [image.data for image in found["a"]] == DATA[:2]
    assert [result.episode_id for result in group.graded] == ["a", "c"]
    assert [(one.episode_id, one.reason) for one in group.excluded] == [("b", "image_missing")]


async def test_an_image_that_cannot_be_read_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_images, "PAUSE_SECONDS", 0.001)
    (objects := bucket()).failure = BusError("away")

    async def come_back() -> None:
        objects.failure = None if objects.gets == 3 else objects.failure

    objects.wait = come_back
    group = group_of("a")
    assert len((await read_images(ImageReader(objects), [group], {"a": played(NAMES[0])}))["a"]) == 1
    objects.wait, objects.failure = None, BusError("away")
    await read_images(ImageReader(objects), [group], {"a": played(NAMES[1])})
    assert [one.reason for one in group.excluded] == ["image_unread"]


class Picky(ScriptedTrainer):
    """Refuses the images of some episodes."""

    def __init__(self, refused: dict[str, type[ImageFailed]]) -> None:
        super().__init__()
        self._refused = refused
        self.checked: list[str] = []

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        assert ids.tolist() == [1, 2, 3, 4, 5]
        assert [(image.start, image.data) for image in images] == [(2, DATA[0])]
        self.checked.append(episode_id)
        if episode_id in self._refused:
            raise self._refused[episode_id]("two tokens here and one in the history")


async def exclude(trainer: Picky, group: Group, shown: str) -> None:
    plain = Action(episode_id="x", attempt=1, turn=0, text="", sampled=pack_ids([4, 5]))
    actions = {episode: played(NAMES[0]) if episode in shown else [plain] for episode in group.results}
    found = await read_images(ImageReader(bucket()), [group], actions)
    await exclude_mismatched(trainer, [group], actions, found, Runtime())


async def test_an_episode_whose_images_the_trainer_cannot_take_leaves_its_group_with_the_reason() -> None:
    """Each of these ended the learner, and every learner after it."""
    group, trainer = group_of("a", "b", "c", "d"), Picky({"a": ImageMismatch, "c": ImageUnreadable})
    await exclude(trainer, group, shown="abc")
    assert trainer.checked == ["a", "b", "c"]
    assert [result.episode_id for result in group.graded] == ["b", "d"]
    assert [(one.episode_id, one.reason) for one in group.excluded] == [("a", "image_mismatch"), ("c", "image_unreadable")]


async def test_images_that_fit_in_no_episode_of_a_batch_end_the_learner_with_the_cause() -> None:
    refused: dict[str, type[ImageFailed]] = dict.fromkeys("abc", ImageMismatch)
    with pytest.raises(UserError, match="none of the 3 episodes of the batch can be trained: two tokens here and one in the"):
        await exclude(Picky(refused), group_of("a", "b", "c"), shown="abc")
    for shown in ("ab", "abc"):  # an episode without images, or one whose file cannot be read, is none of that
        group = group_of("a", "b", "c")
        await exclude(Picky(refused | {"c": ImageUnreadable}), group, shown=shown)
        assert [result.episode_id for result in group.graded] == ["c"] * (shown == "ab")
