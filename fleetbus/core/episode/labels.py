"""The labels and comments of an episode: a fold of `EpisodeLabeled`, bounded whatever was stored. Pure.

Only views use it: rows, transcripts, the page. Training, audit and replay pass the entries over
(docs/decisions/0227-labels-stand-in-the-log.md).
"""

from __future__ import annotations

import msgspec

from fleetbus_schemas import EpisodeLabeled
from fleetbus_schemas.label import (
    MAX_AUTHOR_CHARACTERS,
    MAX_CHANGES,
    MAX_COMMENT_CHARACTERS,
    MAX_COMMENTS,
    MAX_LABELS,
    MAX_NAME_CHARACTERS,
    is_label,
)


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """A label on an episode, or on one ``turn`` of it. ``time_ns`` is the log's."""

    name: str
    turn: int | None = None
    author: str = ""
    time_ns: int = 0


class Comment(msgspec.Struct, frozen=True, kw_only=True):
    """A comment on an episode, or on one ``turn`` of it. ``sequence`` is its position in the log, by which a later one takes
    its place."""

    sequence: int
    text: str
    turn: int | None = None
    author: str = ""
    time_ns: int = 0


class EpisodeLabels:
    """Apply an episode's entries in the order of the log."""

    def __init__(self) -> None:
        self._labels: dict[tuple[int | None, str], Label] = {}
        self._comments: dict[int, Comment] = {}
        self.changes = 0
        """Entries so far."""

    def apply(self, message: EpisodeLabeled, sequence: int, time_ns: int) -> None:
        """Take in an entry; names that no label may have, what is too long, and more than fits are left out."""
        self.changes += 1
        turn, author = message.turn, message.author[:MAX_AUTHOR_CHARACTERS]
        for name in message.remove:
            self._labels.pop((turn, name), None)
        for name in message.add:
            if is_label(name) and len(self._labels) < MAX_LABELS:
                label = Label(name=name, turn=turn, author=author, time_ns=time_ns)
                self._labels.setdefault((turn, name), label)
        replaced = self._comments.pop(message.replaces, None)
        text = message.comment[:MAX_COMMENT_CHARACTERS]
        if text and len(self._comments) < MAX_COMMENTS:
            at = replaced.turn if replaced is not None and turn is None else turn
            self._comments[sequence] = Comment(sequence=sequence, text=text, turn=at, author=author, time_ns=time_ns)

    @property
    def labels(self) -> tuple[Label, ...]:
        """In the order in which they were put on."""
        return tuple(self._labels.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the labels, each once, wherever they are."""
        return tuple(dict.fromkeys(label.name for label in self._labels.values()))

    @property
    def comments(self) -> tuple[Comment, ...]:
        """In the order in which they were made."""
        return tuple(self._comments.values())

    def find_fault(self, message: EpisodeLabeled) -> str:
        """The reason for which an entry would not do what it says, in one line; empty if it would."""
        if bad := next((name for name in message.add if not is_label(name)), None):
            return f"no label can be called {bad[:64]!r}: it has 1 to {MAX_NAME_CHARACTERS} letters, digits, or _ . : / -"
        if len(message.comment) > MAX_COMMENT_CHARACTERS:
            return f"a comment may have {MAX_COMMENT_CHARACTERS:,} characters, this one has {len(message.comment):,}"
        if len(message.author) > MAX_AUTHOR_CHARACTERS:
            return f"the name of an author may have {MAX_AUTHOR_CHARACTERS} characters"
        if message.replaces and message.replaces not in self._comments:
            return f"there is no comment {message.replaces} on episode {message.episode_id}: it was replaced, or is another's"
        if self.changes >= MAX_CHANGES:
            return f"the labels of episode {message.episode_id} were changed {MAX_CHANGES} times, which is the most"
        after = {*self._labels} - {(message.turn, name) for name in message.remove}
        if len(after | {(message.turn, name) for name in message.add}) > MAX_LABELS:
            return f"episode {message.episode_id} would have more than {MAX_LABELS} labels: remove some"
        if message.comment and not message.replaces and len(self._comments) >= MAX_COMMENTS:
            return f"episode {message.episode_id} has {MAX_COMMENTS} comments, which is the most: replace one"
        return ""
