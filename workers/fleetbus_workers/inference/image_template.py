"""The chat template of a model that sees: like that of any other model, with one image token where each image is shown.

What an image token becomes is for `ImagePrompts` to say, which knows the images; the template knows only where they stand.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, Text
from fleetbus_workers.images.processing import ImageProcessor
from fleetbus_workers.inference.chat_template import ChatTemplate

_WORD = "Fleetbusword"


class ImageTemplate(ChatTemplate):
    """`Template` whose prompts have one ``processor.image_token_id`` per image. Raises `UserError` as `ChatTemplate` does, and
    if the template shows no images. An image token within the text of a message is broken like every other special token."""

    def __init__(self, folder: Path, processor: ImageProcessor, **options: Any) -> None:
        self.processor = processor
        self._in_parts = True
        super().__init__(folder, **options)
        self._control = re.compile(f"{re.escape(processor.image_token)}|{self._control.pattern}")
        self._check_images()

    def _convert_message(self, message: ChatMessage) -> dict[str, Any]:
        if isinstance(message.content, str):
            return super()._convert_message(message)
        parts = [
            {"type": "text", "text": self._escape_special_tokens(part.text)} if isinstance(part, Text) else {"type": "image"}
            for part in message.content
        ]
        return {"role": message.role, "content": parts, **self._convert_reference(message)}

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, object]] | None = None) -> str:
        """Templates of such models want contents in parts; a few take text alone for a text."""
        if not self._in_parts:
            return super()._render(messages, tools)
        rendered = super()._render([_in_parts(message) for message in messages], tools)
        if "'type'" in rendered and "'type'" not in str([message["content"] for message in messages if _is_text(message)]):
            self._in_parts = False
            return super()._render(messages, tools)
        return rendered

    def _check_images(self) -> None:
        parts = [{"type": "image"}, {"type": "text", "text": _WORD}, {"type": "image"}]
        rendered = self._render([{"role": "user", "content": parts}])
        if rendered.count(self.processor.image_token) != 2 or _WORD not in rendered:
            raise UserError(
                f"{self._folder}: the chat template does not write {self.processor.image_token} for each image of a message; "
                "put a chat_template.jinja that does into the folder"
            )


def _is_text(message: dict[str, object]) -> bool:
    return isinstance(message["content"], str)


def _in_parts(message: dict[str, object]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]} if _is_text(message) else message
