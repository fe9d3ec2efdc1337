"""A published version as vLLM's ``reload_weights`` wants it: a folder with one safetensors file, checked before it is linked.

Shared by the engine in process and by vLLM's servers. Torch and safetensors are imported only when a file is checked.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.images.model_folder import has_vision
from fleetbus_workers.weights.adapters import WEIGHTS_NAME as ADAPTER_NAME
from fleetbus_workers.weights.adapters import check_adapters, has_adapters, write_configuration
from fleetbus_workers.weights.file import WeightsRejected, read_weights, save_tensors
from fleetbus_workers.weights.names import copy_companions

WEIGHTS_NAME = "model.safetensors"
CONFIGURATION = "config.json"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
HEAD_FILE = "lm_head.safetensors"
EMBEDDING = "embed_tokens.weight"
BASE = "base"
NESTINGS = frozenset({"model", "language_model", "vision_model"})


class WeightFolders:
    """Folders of versions below ``place``, for the model in ``model``: `prepare` makes one, `remove_others` removes others.

    With ``untie`` the output head of a tied model is a tensor of its own, in the folders as in `base`, the one that an engine
    has to be started with: vLLM on a CPU packs the head when it starts and keeps that copy when the embedding is reloaded
    (seen with 0.32: log-probabilities off by 0.39 after a swap; docs/decisions/0060).
    """

    def __init__(self, model: Path, place: Path, *, untie: bool = False) -> None:
        self._model = model
        self._place = place
        self._shapes = read_model_shapes(model)
        self._has_vision = has_vision(model)
        self._tied = has_tied_embeddings(model)
        self._untie = untie and self._tied

    def prepare_base(self) -> Path:
        """The folder to start an engine with; blocking."""
        if not self._untie:
            return self._model
        folder = self._place / BASE
        self._create_folder(folder)
        for file in self._model.glob("*.safetensors"):
            _link_or_copy(file, folder / file.name)
        index = self._model / INDEX
        if index.exists():
            listing = json.loads(index.read_text())
            listing["weight_map"][HEAD] = HEAD_FILE
            (folder / INDEX).write_text(json.dumps(listing))
        _write_head(folder, sorted(folder.glob("*.safetensors")))
        return folder

    def prepare(self, policy: PolicyPublished) -> Path:
        """A folder with the checked weights of ``policy``; blocking.

        Names, shapes, dtypes, hashes and finiteness are checked here, because vLLM itself loads half a file without a word
        and dies of a wrong shape. Raises `WeightsRejected`.
        """
        tensors = read_weights(policy.uri, policy.manifest, mapped=True)
        if has_adapters(tensors):
            return self._prepare_adapters(policy, tensors)
        self._expect_model(policy.uri, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        folder = self._place / f"v{policy.version:06d}"
        try:
            self._create_folder(folder)
            _link_or_write(parse_file_uri(policy.uri), folder / WEIGHTS_NAME, tensors)
            if self._untie and HEAD not in tensors:
                _write_head(folder, [folder / WEIGHTS_NAME])
        except OSError as error:
            raise WeightsRejected(f"{folder}: cannot be written: {error}") from error
        return folder

    def check(self, policy: PolicyPublished) -> dict[str, str]:
        """For tensors of a whole version that lie elsewhere and are those of its manifest: which of them an engine has to load
        under a second name (by that). Raises `WeightsRejected` if they are not the model's."""
        names = [entry.name for entry in policy.manifest]
        self._expect_model(policy.uri, {entry.name: entry.shape for entry in policy.manifest})
        if not self._untie or HEAD in names:
            return {}
        return {HEAD: _find_embedding(policy.uri, names)}

    def count_numbers(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def _expect_model(self, what: str, found: Mapping[str, tuple[int, ...]]) -> None:
        expected: Mapping[str, tuple[int, ...]] = self._shapes
        if self._has_vision:
            found, expected = strip_nesting(found), strip_nesting(expected)
        check_shapes(what, found, expected, tied=self._tied)

    def _prepare_adapters(self, policy: PolicyPublished, tensors: Mapping[str, Any]) -> Path:
        ranks = check_adapters(policy.uri, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, self._shapes)
        folder = self._place / f"v{policy.version:06d}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_configuration(folder, ranks)
            _link_or_write(parse_file_uri(policy.uri), folder / ADAPTER_NAME, tensors)
        except OSError as error:
            raise WeightsRejected(f"{folder}: cannot be written: {error}") from error
        return folder

    def _create_folder(self, folder: Path) -> None:
        """A folder with everything of the model but its weights."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copy_companions(self._model, folder)
        if self._untie:
            _set_untied(folder / CONFIGURATION)

    def remove_others(self, *folders: Path | None) -> None:
        """Remove the folders of other versions."""
        if self._place.is_dir():
            for folder in self._place.iterdir():
                if folder not in folders and folder.name != BASE:
                    shutil.rmtree(folder, ignore_errors=True)


def read_model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model folder, from the headers of its safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as stored:
            shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # no mapping
    return shapes


def strip_nesting(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same under names that do not say how models are nested: an image-text model in memory calls its tensors
    ``model.language_model.norm.weight``, its older files ``language_model.model.norm.weight``; vLLM loads both. Tensors that
    would share a name keep their own."""
    plain = {name: ".".join(part for part in name.split(".") if part not in NESTINGS) for name in shapes}
    common = Counter(plain.values())
    return {plain[name] if common[plain[name]] == 1 else name: shape for name, shape in shapes.items()}


def has_tied_embeddings(folder: Path) -> bool:
    """True if the model's output head is its embedding, which published weights then hold once."""
    config = json.loads((folder / CONFIGURATION).read_text())
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))


def check_shapes(
    what: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> None:
    """Raise `WeightsRejected` if tensors are missing, unknown, or of another shape than the model's."""
    missing = sorted(expected.keys() - found.keys() - ({"lm_head.weight"} if tied else set()))
    unknown = sorted(found.keys() - expected.keys() - ({"lm_head.weight"} if tied else set()))
    for kind, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise WeightsRejected(f"{what}: {kind} {len(names)} of {len(expected)} tensors: {', '.join(names[:3])}")
    for name, shape in found.items():
        if name in expected and shape != expected[name]:
            raise WeightsRejected(f"{what}: {name} has shape {list(shape)}, the model {list(expected[name])}")


def _set_untied(file: Path) -> None:
    config = json.loads(file.read_text())
    config["tie_word_embeddings"] = False
    if "text_config" in config:
        config["text_config"]["tie_word_embeddings"] = False
    file.write_text(json.dumps(config))


def _find_embedding(what: str, names: Iterable[str]) -> str:
    """The name of the tensor that a tied model's head is. Raises `WeightsRejected`."""
    for name in names:
        if name.endswith(EMBEDDING):
            return name
    raise WeightsRejected(f"{what}: no tensor is named *{EMBEDDING}, so the output head cannot be found")


def _write_head(folder: Path, files: Sequence[Path]) -> None:
    """Write the embedding once more, as the output head."""
    from safetensors import safe_open

    names: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            names |= dict.fromkeys(stored.keys(), file)
    name = _find_embedding(str(folder), names)
    with safe_open(names[name], framework="pt") as stored:
        save_tensors({HEAD: stored.get_tensor(name)}, folder / HEAD_FILE)


def parse_file_uri(uri: str) -> Path:
    """The path of a ``file://`` URI, or the path that it is."""
    return Path(unquote(urlsplit(uri).path)) if uri.startswith("file://") else Path(uri)


def _link_or_write(source: Path, target: Path, tensors: Mapping[str, Any]) -> None:
    """The file that was checked, or its tensors where it is not a file of this machine."""
    if source.is_file():
        _link_or_copy(source, target)
        return
    save_tensors(tensors, target)


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name for the same bytes, so that the learner may remove its own; a copy where links cannot cross."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
