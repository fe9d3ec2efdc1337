"""Models in a GGUF file: converted once, into a folder of the cache that transformers' ``from_pretrained`` loads.

The folder is named after the file's digest, and has the digests of its own files: one that is broken is made anew. The
conversion runs in a process of its own, because it needs torch, which `fleetbus up` itself does without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fleetbus.errors import UserError
from fleetbus.files import find_cache_folder
from fleetbus.python_process import build_module_command
from fleetbus_schemas.message import UNREADABLE

DIGESTS = "digests.json"
"""By name the SHA-256 of the other files of a converted folder, written last."""

PACKAGES = ("torch", "transformers", "gguf", "accelerate")
CONVERSION_SECONDS = 1800.0
_MAGIC = b"GGUF"


def find_converted(file: Path) -> Path:
    """The folder that was made of a GGUF file, made now if there is none, or if it is broken. Raises `UserError`."""
    digest = _hash_gguf(file)
    folder = find_cache_folder() / "models" / f"{file.stem}-{digest[:16]}"
    if not is_whole(folder):
        _check_packages(file)
        print(f"converting {file.name}, once, into {folder}: half a minute", file=sys.stderr, flush=True)  # noqa: T201
        _convert_apart(file, folder)
    return folder


def is_whole(folder: Path) -> bool:
    """True if a converted folder has all its files as they were written."""
    try:
        digests = msgspec.json.decode((folder / DIGESTS).read_bytes(), type=dict[str, str])
        return bool(digests) and all(_hash_file(folder / name) == digest for name, digest in digests.items())
    except (OSError, *UNREADABLE):
        return False


def convert(file: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file into an empty folder. Raises what transformers raises for a file
    that it does not read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(**place)
    configuration = read.config
    if hasattr(configuration, "quantization_config"):  # its weights are not quantized any more
        del configuration.quantization_config
    model = AutoModelForCausalLM.from_config(configuration)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    digests = {path.name: _hash_file(path) for path in sorted(folder.iterdir())}
    (folder / DIGESTS).write_bytes(msgspec.json.format(msgspec.json.encode(digests)))


def _convert_apart(file: Path, folder: Path) -> None:
    """`convert` in a process of its own, into a folder that takes its name when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        command = build_module_command("fleetbus_workers.assembly.gguf_model", str(file.absolute()), str(made))
        variables = {**os.environ, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        try:
            ended = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=CONVERSION_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{file} was not converted within {CONVERSION_SECONDS:g} s") from error
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1][:300]
            raise UserError(f"{file} cannot be converted into a model that is trained: {reason}")
        if is_whole(folder):  # another process was faster
            return
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _check_packages(file: Path) -> None:
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"{file.name} is read with {', '.join(missing)}, not installed: pip install 'fleetbus[smollm2]'")


def _hash_gguf(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{file} is no GGUF file")
        return _hash_file(file)
    except OSError as error:
        raise UserError(f"--model {file}: {error.strerror}") from error


def _hash_file(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
