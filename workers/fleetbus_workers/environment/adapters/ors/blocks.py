"""Blocks of the Open Reward Standard, text and images, as a policy is shown them.

Texts come first, with a word where each image stood; the images follow, stored by their hash, as in answers of MCP servers.
Above it is `environment`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

import anyio
import msgspec

from fleetbus.core.text.prompts import truncate_text
from fleetbus_schemas import ChatMessage, Text, ToolOutput, ToolSpec
from fleetbus_workers.environment.adapters.common.tool_results import Content
from fleetbus_workers.environment.adapters.ors.messages import Block, Listing
from fleetbus_workers.environment.base import EnvironmentFailed, Step
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage, encode_image_file

NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}
MAX_IMAGES = 16
MAX_IMAGE_BYTES = 8 << 20
"""Of one answer: further and larger images are words."""


def build_tools(listing: Listing) -> tuple[ToolSpec, ...]:
    """Tools as the policy is told of them; one without a schema takes nothing."""
    return tuple(
        ToolSpec(name=tool.name, description=tool.description or "", parameters=tool.input_schema or NO_PARAMETERS)
        for tool in listing.tools
    )


async def show_blocks(
    blocks: Sequence[Block], store: StoreImage | None, frame: Callable[[str], str], more: str = ""
) -> Content:
    """Blocks as the content of a message. ``frame`` writes the words around a text, ``more`` follows images; without ``store``
    a word stands for each image. Raises `EnvironmentFailed` for an image that cannot be read."""
    shown = [block for block in blocks if block.type == "image" and is_shown(block)][:MAX_IMAGES]
    if store is None or not shown:
        return frame(describe_blocks(blocks))
    parts = [Text(text=frame(describe_blocks(blocks)) + more)]
    images = []
    for block in shown:
        picture = await anyio.to_thread.run_sync(read_image, block)
        image = await store(picture)
        images.append(msgspec.structs.replace(image, width=image.width or picture.width, height=image.height or picture.height))
    return (*parts, *images)


def build_step(content: Content, more: str, limit: int, *, failed: bool, output: str | None) -> Step:
    """The step that shows ``content`` and then ``more``, text of at most ``limit`` bytes; a call if it ``failed`` or has an
    ``output``."""
    if isinstance(content, str):
        content = truncate_text(content, limit - len(more)) + more
    text = str(content) if output is None else truncate_text(output, limit)
    called = failed or output is not None
    given = ToolOutput(text=text, failed=failed) if called else None
    messages = (ChatMessage(role="user", content=content),)
    return Step(messages=messages, tool_calls=int(called), tool_errors=int(failed), output=given)


def describe_blocks(blocks: Sequence[Block]) -> str:
    """The texts of blocks, each on lines of its own, with a word for each block that is none."""
    return "\n".join(
        block.text if block.type == "text" else f"[{block.type}, {block.mimeType or 'no type'}]" for block in blocks
    )


def is_shown(block: Block) -> bool:
    return len(block.data) * 3 // 4 <= MAX_IMAGE_BYTES


def read_image(block: Block) -> EncodedImage:
    """The picture of an image block. Blocking. Raises `EnvironmentFailed` for what is none."""
    try:
        return encode_image_file(base64.b64decode(block.data, validate=True))
    except ValueError as error:
        raise EnvironmentFailed(f"an image of the server's cannot be read: {error}") from error
