"""Labels and comments, which people put on episodes. On ``label.<episode>``; no worker reads it."""

from __future__ import annotations

import re

from fleetbus_schemas.message import Message

MAX_NAME_CHARACTERS = 48
MAX_COMMENT_CHARACTERS = 2_000
MAX_AUTHOR_CHARACTERS = 200

MAX_LABELS = 32
"""Of an episode and its turns together; further ones are not counted."""

MAX_COMMENTS = 32
"""Of an episode and its turns together; further ones are not counted."""

MAX_CHANGES = 512
"""Entries of one episode: who writes refuses to store more."""

_NAME = re.compile(rf"\w[\w.:/-]{{0,{MAX_NAME_CHARACTERS - 1}}}\Z")


class EpisodeLabeled(Message, frozen=True, kw_only=True):
    """A person, by command or page → log, on ``label.<episode>``; expects the last entry there.

    The labels ``add`` are put on the episode, or on its ``turn`` alone, and those of ``remove`` are taken off it. ``comment``
    is a remark on the same; with ``replaces`` it takes the place of the comment in the entry at that position of the log, and
    an empty one removes it. ``author`` is who says so, and the entry's time is when. It changes nothing of the episode: not
    its reward, and not that it is trained.
    """

    episode_id: str
    turn: int | None = None
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    comment: str = ""
    replaces: int = 0
    author: str = ""


def is_label(name: str) -> bool:
    """True if a label may be called so: letters, digits, ``_``, and within also ``.``, ``:``, ``/`` and ``-``."""
    return _NAME.match(name) is not None
