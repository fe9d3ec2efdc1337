"""Questions about small pictures: the same for the same task, graded by the first word; words where nobody keeps images."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image as Pillow

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Image, Task, Text
from fleetbus_workers.environment.adapters.colours import COLOURS, PLACES, SIZE, ColoursEnvironment, draw
from fleetbus_workers.environment.images.observation import EncodedImage
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_alone
from tests.support.tool_calls import NoGrader
from tests.support.vision_models import hash_name

anyio_backend = asyncio_alone


class Kept:
    """Pictures that were shown, in order."""

    def __init__(self) -> None:
        self.pictures: list[EncodedImage] = []

    async def __call__(self, picture: EncodedImage) -> Image:
        self.pictures.append(picture)
        return Image(object=hash_name(picture.data))


def said(text: str) -> Action:
    return Action(episode_id="e", attempt=1, turn=0, text=text)


async def play(environment: ColoursEnvironment, task: Task, *, rightly: bool) -> tuple[list[ChatMessage], float | None]:
    await environment.open(task)
    messages = list((await environment.reset()).messages)
    while True:
        answer = (await environment.state())["answer"] if rightly else "colourless"
        step = await environment.step(said(f" {answer.capitalize()}, of course"))
        messages += step.messages
        if step.terminated:
            verdict = await environment.verify()
            await environment.close()
            return messages, verdict.reward


async def test_the_same_task_shows_the_same_pictures_and_another_seed_others() -> None:
    shown = []
    for seed in (1, 1, 2):
        kept = Kept()
        messages, _ = await play(
            ColoursEnvironment(3, store_image=kept), Task(key="t", prompt="Which?", seed=seed), rightly=True
        )
        shown.append([picture.data for picture in kept.pictures])
        assert [message.content for message in messages] == [
            (Image(object=hash_name(data), width=SIZE, height=SIZE), Text(text=" Which?")) for data in shown[-1]
        ]
    assert shown[0] == shown[1] != shown[2]


async def test_the_first_word_is_the_answer_and_the_reward_the_share_of_right_ones() -> None:
    for config in ({}, {"ask": "place"}, {"turns": 4}):
        task = Task(key="t", seed=3, config=config)
        assert (await play(ColoursEnvironment(store_image=Kept()), task, rightly=True))[1] == 1.0
        assert (await play(ColoursEnvironment(store_image=Kept()), task, rightly=False))[1] == 0.0


async def test_without_a_bucket_words_stand_for_pictures() -> None:
    messages, _ = await play(ColoursEnvironment(1), Task(key="t", prompt="Which?"), rightly=True)
    assert messages[0].content == "[image, 32x32] Which?"


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("place", PLACES)
def test_a_picture_shows_its_colour_in_its_corner(colour: str, place: str) -> None:
    with Pillow.open(io.BytesIO(draw(colour, place, 1))) as image:
        column, row = PLACES[place]
        found: Any = image.getpixel((4 + column * (SIZE - 8), 4 + row * (SIZE - 8)))
    assert (
        min(COLOURS, key=lambda name: sum(abs(one - other) for one, other in zip(COLOURS[name], found, strict=True))) == colour
    )


def test_a_number_of_turns_is_a_number() -> None:
    build_environment_factory("colours:3", verifier=NoGrader())
    with pytest.raises(UserError, match="number of turns must be 1 or more"):
        build_environment_factory("colours:many", verifier=NoGrader())
