"""Models of the Hugging Face Hub by their id, as in ``Qwen/Qwen3-0.6B``: downloaded once, into the Hub's own cache."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from fleetbus.errors import UserError

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """True for what has the form of an id, and is no folder here, nor in one that is."""
    return bool(_ID.fullmatch(name)) and not Path(name).exists() and not Path(name.partition("/")[0]).is_dir()


def download_model(name: str) -> Path:
    """The folder of a model with this id. Raises `UserError` without the package, the network or such a model."""
    return _download(name, FILES)


def find_config(name: str) -> Path:
    """A folder with the model's ``config.json``, of which nothing else is downloaded. Raises as `download_model`."""
    return _download(name, ("config.json",)) if is_hub_id(name) else Path(name).expanduser()


def _download(name: str, files: Sequence[str]) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(f"--model {name}: no such folder; to load it from the Hugging Face Hub: pip install huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except RepositoryNotFoundError as error:
        raise UserError(
            f"--model {name}: there is no such folder, and the Hugging Face Hub shows no such model to you"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UserError(
            f"--model {name}: there is no such folder, and the Hugging Face Hub is out of reach: {reason}"
        ) from error
