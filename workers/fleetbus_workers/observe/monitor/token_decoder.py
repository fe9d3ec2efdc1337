"""Token ids as text, where the run's tokenizer can be read from here. Without it the page shows ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()


class TokenDecoder:
    """Decodes ids one by one, each once."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each id alone; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        for token in ids:
            if token not in self._known:
                self._known[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return [self._known[token] for token in ids]


def load_token_decoder(model: Path) -> TokenDecoder:
    """The tokenizer of a model folder, if it can be read and the package ``tokenizers`` is here."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return TokenDecoder()
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return TokenDecoder()
    try:
        return TokenDecoder(Tokenizer.from_file(str(file)))
    except Exception as error:  # noqa: BLE001 - tokenizers has no narrower one
        log.warning("tokenizer is unreadable; showing token ids only", tokenizer=str(file), reason=str(error))
        return TokenDecoder()
