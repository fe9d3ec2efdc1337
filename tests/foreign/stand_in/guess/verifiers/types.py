"""The one type of the stand-in."""

from __future__ import annotations

from typing import Any


class ClientConfig:
    def __init__(self, **settings: Any) -> None:
        self.url: str = settings["api_base_url"]
