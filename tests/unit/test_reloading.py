"""Folders of versions that vLLM loads: only what was checked, and an output head of its own where the engine needs one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.inference.weight_folders import WeightFolders
from fleetbus_workers.weights.file import WeightsRejected, write_weights

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({EMBEDDING: torch.ones(4, 2), "norm": torch.ones(2)}, folder / "model.safetensors")
    return folder


def published(place: Path, tensors: dict[str, torch.Tensor], version: int = 1) -> PolicyPublished:
    file = place / f"v{version}.safetensors"
    return PolicyPublished(
        policy="default", version=version, lineage="l", step=1, uri=file.as_uri(),
        manifest=write_weights(file, tensors), size_bytes=1,
    )  # fmt: skip


def good() -> dict[str, torch.Tensor]:
    return {EMBEDDING: torch.full((4, 2), 3.0), "norm": torch.zeros(2)}


def test_a_version_becomes_a_folder_with_the_model_s_files_around_the_same_bytes(model: Path, tmp_path: Path) -> None:
    policy = published(tmp_path, good())
    folder = WeightFolders(model, tmp_path / "served").prepare(policy)
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").samefile(tmp_path / "v1.safetensors")
    (tmp_path / "v1.safetensors").unlink()
    assert load_file(folder / "model.safetensors")["norm"].tolist() == [0.0, 0.0]


def test_the_head_of_a_tied_model_is_told_apart_on_request(model: Path, tmp_path: Path) -> None:
    reloadable = WeightFolders(model, tmp_path / "served", untie=True)
    base, version = reloadable.prepare_base(), reloadable.prepare(published(tmp_path, good()))
    for folder, value in ((base, 1.0), (version, 3.0)):
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
        assert load_file(folder / "lm_head.safetensors")["lm_head.weight"].unique().tolist() == [value]
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is True
    reloadable.remove_others(version)
    assert base.exists() and version.exists()
    reloadable.remove_others(None)
    assert base.exists() and not version.exists()


def test_an_untied_model_is_served_from_its_own_folder(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text("{}")
    assert WeightFolders(model, tmp_path / "served", untie=True).prepare_base() == model


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tensors: tensors.pop("norm"), "lacks 1 of 2 tensors: norm"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "has unknown 1"),
        (lambda tensors: tensors.update(norm=torch.ones(3)), r"norm has shape \[3\], the model \[2\]"),
        (lambda tensors: tensors.update(norm=torch.tensor([1.0, float("nan")])), "not finite"),
    ],
)
def test_what_does_not_fit_the_model_is_rejected_and_leaves_no_folder(
    model: Path, tmp_path: Path, spoil: object, reason: str
) -> None:
    tensors = good()
    spoil(tensors)  # type: ignore[operator]
    with pytest.raises(WeightsRejected, match=reason):
        WeightFolders(model, tmp_path / "served").prepare(published(tmp_path, tensors))
    assert not (tmp_path / "served").exists()
