"""What lies beside the weights in a model folder: configuration, tokenizer, template, vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path

COMPANIONS = (".json", ".jinja", ".txt", ".model")
"""Their suffixes; an index of weights belongs to the weights."""


def copy_companions(model: Path, folder: Path) -> None:
    """Copy them from one folder into another. Raises `OSError`."""
    for file in model.iterdir():
        if file.suffix in COMPANIONS and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
