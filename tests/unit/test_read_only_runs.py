"""An inference worker whose run folder is mounted read-only still takes new versions."""

from pathlib import Path

import msgspec
import torch

from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings
from fleetbus_schemas import PolicyPublished
from fleetbus_workers.assembly.engines import find_scratch_folder
from fleetbus_workers.inference.weight_folders import WEIGHTS_NAME, WeightFolders
from fleetbus_workers.weights.file import write_weights
from tests.support.trainable_model import make_model


def test_versions_are_prepared_outside_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    runs = tmp_path / "runs"
    weights = runs / "r" / "weights"
    weights.mkdir(parents=True)
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    manifest = write_weights(weights / "v1.safetensors", tensors)
    configuration = Configuration(
        run=RunSettings(name="r", folder=str(runs)), inference=InferenceSettings(scratch=str(tmp_path / "scratch"))
    )
    before = set(runs.rglob("*"))
    policy = PolicyPublished(
        policy="default",
        version=1,
        lineage="l1",
        step=1,
        uri=(weights / "v1.safetensors").as_uri(),
        manifest=manifest,
        size_bytes=1,
    )

    folder = WeightFolders(model, find_scratch_folder(configuration, "inference-0") / "served").prepare(policy)

    assert set(runs.rglob("*")) == before
    assert torch.equal(load_file(folder / WEIGHTS_NAME)["lm_head.weight"], tensors["lm_head.weight"])
    inside = msgspec.structs.replace(configuration, inference=InferenceSettings())
    assert find_scratch_folder(inside, "inference-0").is_relative_to(runs)
