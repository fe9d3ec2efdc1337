"""Token ids as text, where the run's tokenizer can be read from here. Without it the page shows ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    """The tokenizer of a model folder, if it and the package ``tokenizers`` are here."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return Words()
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return Words()
    return Words(Tokenizer.from_file(str(file)))
