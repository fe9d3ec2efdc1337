"""The judge that the configuration names, checked before anything is asked of it. Raises `UserError`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio

from fleetbus.core.algorithms.reward_components import parse_weights
from fleetbus.errors import UserError

if TYPE_CHECKING:
    from fleetbus.config.training_settings import RewardSettings
    from fleetbus_workers.judge.client import Judge

KEY = "JUDGE_API_KEY"
"""Environment variable with the judge's key; it is never written anywhere."""

MAX_RUBRIC_BYTES = 64 << 10


def read_weights(settings: RewardSettings, *, judged: bool) -> dict[str, float]:
    """The weight of each component that counts; ``judged``: there is a judge. Raises `UserError`."""
    try:
        return parse_weights(settings.weights, judged=judged)
    except ValueError as error:
        raise UserError(f"reward.weights = {settings.weights}: {error}") from None


def check_judge(settings: RewardSettings) -> str:
    """The rubric of the judge that is set, empty if none is. Raises `UserError` for what would make every request fail."""
    read_weights(settings, judged=bool(settings.judge_url))
    if not settings.judge_url:
        return ""
    parts = urlsplit(settings.judge_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("reward.judge_url must be the base URL of a server, such as http://host:8000")
    if "@" in parts.netloc:
        raise UserError(f"reward.judge_url must not contain a password, as settings are written to files: set {KEY} instead")
    key = os.environ.get(KEY, "")
    if not key.isascii() or any(not character.isprintable() or character.isspace() for character in key):
        raise UserError(f"{KEY} has a character that no header may have: a line break, a space or a quotation mark of a text")
    if importlib.util.find_spec("httpx") is None:
        raise UserError("a judge needs httpx: pip install 'fleetbus[environment]'")
    if settings.judge_cache and not Path(settings.judge_cache).is_dir():
        raise UserError(f"reward.judge_cache = {settings.judge_cache}: no folder is there; make it")
    if not settings.judge_rubric:
        raise UserError("reward.judge_url needs reward.judge_rubric: a text file that says what to grade and how")
    try:
        with open(settings.judge_rubric, encoding="utf-8") as file:
            rubric = file.read(MAX_RUBRIC_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"reward.judge_rubric = {settings.judge_rubric}: {reason}") from None
    if not rubric.strip() or len(rubric) > MAX_RUBRIC_BYTES:
        raise UserError(f"reward.judge_rubric = {settings.judge_rubric}: it has to have 1 to {MAX_RUBRIC_BYTES} characters")
    return rubric


@asynccontextmanager
async def open_judge(settings: RewardSettings) -> AsyncIterator[Judge | None]:
    """The judge, None if none is set. Raises `UserError`."""
    if not (rubric := check_judge(settings)):
        yield None
        return
    from fleetbus_workers.judge.client import Judge

    judge = Judge(settings, rubric=rubric, key=os.environ.get(KEY, ""))
    try:
        yield judge
    finally:
        with anyio.CancelScope(shield=True):
            await judge.close()
