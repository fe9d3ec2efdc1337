"""The images that episodes were shown, read again for training. An episode whose image is gone, or is for the trainer not what
it was for the sampler, is excluded."""

from collections.abc import Mapping, Sequence

import anyio
import numpy as np
import structlog

from fleetbus.concurrency.runtime import Runtime
from fleetbus.core.episode.history import shift_images
from fleetbus.core.training.groups import Group
from fleetbus.errors import UserError
from fleetbus_schemas import Action, ShownImage
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.reader import ImageFailed, ImageMismatch, ImageNotFetched, ImageReader
from fleetbus_workers.learner.base import Trainer

MAX_TRIES = 5
PAUSE_SECONDS = 2.0
EPISODES_AT_A_TIME = 8

log = structlog.get_logger()


async def read_images(
    reader: ImageReader | None, groups: Sequence[Group], actions: Mapping[str, Sequence[Action]]
) -> dict[str, tuple[PlacedImage, ...]]:
    """By episode the images of its history, their places counted from its beginning. An episode that lacks one leaves its
    group, with the reason."""
    shown = {episode: images for episode, played in actions.items() if (images := list_images(played))}
    found: dict[str, tuple[PlacedImage, ...]] = {}
    if not shown:
        return found
    limiter = anyio.CapacityLimiter(EPISODES_AT_A_TIME)

    async def read(group: Group, episode: str) -> None:
        structlog.contextvars.bind_contextvars(episode=episode, deadline_ns=group.deadlines_ns.get(episode))
        async with limiter:
            images, reason = await _load_images(reader, shown[episode])
        if reason:
            group.unusable[episode] = reason
        found[episode] = images

    async with anyio.create_task_group() as tasks:
        for group in groups:
            for result in group.graded:
                if result.episode_id in shown:
                    tasks.start_soon(read, group, result.episode_id)
    return found


async def exclude_mismatched(
    trainer: Trainer,
    groups: Sequence[Group],
    actions: Mapping[str, Sequence[Action]],
    shown: Mapping[str, Sequence[PlacedImage]],
    runtime: Runtime,
) -> None:
    """Episodes whose images (``shown``, by episode) ``trainer`` cannot train leave their group, with the reason. Raises
    `UserError` if that is every episode because of other tokens: then sampler and trainer do not process images alike."""
    mismatches: list[ImageMismatch] = []
    graded = [(group, result.episode_id) for group in groups for result in group.graded]
    for group, episode in graded:
        if not shown.get(episode):
            continue
        packed = b"".join(action.prompt_delta + action.sampled for action in actions[episode])
        ids = np.frombuffer(packed, "<u4").astype(np.int32)
        try:
            await runtime.offload(trainer.check_images, episode, ids, shown[episode])
        except ImageFailed as failed:
            log.error(
                "images cannot be trained; excluding the episode",
                episode=episode,
                deadline_ns=group.deadlines_ns.get(episode),
                reason=str(failed),
            )
            group.unusable[episode] = failed.error_class
            mismatches += [failed] if isinstance(failed, ImageMismatch) else []
    if mismatches and len(mismatches) == len(graded):
        raise UserError(f"none of the {len(graded)} episodes of the batch can be trained: {mismatches[-1]}")


def list_images(actions: Sequence[Action]) -> list[ShownImage]:
    """The images of the turns of one episode, their places counted from its beginning."""
    images: list[ShownImage] = []
    length = 0
    for action in actions:
        images += shift_images(action.images, length)
        length += count_tokens(action.prompt_delta) + count_tokens(action.sampled)
    return images


async def _load_images(reader: ImageReader | None, shown: Sequence[ShownImage]) -> tuple[tuple[PlacedImage, ...], str]:
    """The images with their bytes; or none, and why. What may pass is tried again for a while."""
    for left in reversed(range(MAX_TRIES)):
        try:
            if reader is None:
                raise ImageNotFetched("this learner reads no images")
            return tuple(
                [
                    PlacedImage(object=each.object, start=each.start, stop=each.stop, data=await reader.read(each.object))
                    for each in shown
                ]
            ), ""
        except ImageFailed as failed:
            log.error("image is unavailable; excluding the episode", reason=str(failed))
            return (), failed.error_class
        except ImageNotFetched as unread:
            log.warning(
                "image read failed; retrying" if left else "image is unavailable; excluding the episode", reason=str(unread)
            )
            if left:
                await anyio.sleep(PAUSE_SECONDS)
    return (), "image_unread"
