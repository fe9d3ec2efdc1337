"""Token ids as text, where the run's tokenizer can be read from here. Without it the page shows ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()


class Words:
    """Decodes ids one by one, each once."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each id alone; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        for token in ids:
            if token not in self._known:
                self._known[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return [self._known[token] for token in ids]


def load_words(model: Path) -> Words:
    """The tokenizer of a model folder, if it can be read and the package ``tokenizers`` is here."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return Words()
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return Words()
    try:
        return Words(Tokenizer.from_file(str(file)))
    except Exception as error:  # tokenizers has no narrower one
        log.warning("ids are shown without their text", tokenizer=str(file), reason=str(error))
        return Words()
