"""A search as people type it, as a query of SQLite's FTS5 that always parses: every word is quoted. Pure."""

from __future__ import annotations

import re

from fleetbus.errors import UserError

MAX_WORDS = 32
MAX_QUERY_CHARACTERS = 1000

_WORDS = re.compile(r'"([^"]*)"?|([^\s"]+)')
_UNUSABLE = re.compile("[\x00-\x1f\ud800-\udfff]+")


def build_match(text: str) -> str:
    """All of these words in one text, whatever their case and accents; words within double quotes as they follow each other, a
    word that ends in ``*`` by its beginning. Raises `UserError` if there is nothing to search for."""
    found = [quoted or word for quoted, word in _WORDS.findall(_UNUSABLE.sub(" ", text[:MAX_QUERY_CHARACTERS]))]
    words = [word for word in found if any(character.isalnum() for character in word)][:MAX_WORDS]
    if not words:
        raise UserError("there is nothing to search for: give a word with letters or digits")
    return " ".join(f'"{word}"*' if word.endswith("*") else f'"{word}"' for word in words)
