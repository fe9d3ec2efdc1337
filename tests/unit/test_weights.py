"""Weights files: what is written is read back, and nothing that differs from its manifest ever comes through."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from fleetbus_schemas import TensorEntry
from fleetbus_workers.weights.file import WeightsRejected, check_names, read_weights, unique_tensors, write_weights


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(5, 4),
        "half": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "steps": torch.arange(4),
        "view": torch.randn(4, 6).t(),
    }


def published(folder: Path) -> tuple[Path, tuple[TensorEntry, ...]]:
    return folder / "weights.safetensors", write_weights(folder / "weights.safetensors", some_tensors())


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    file, manifest = published(tmp_path)
    read = read_weights(file, manifest)
    assert list(read) == list(some_tensors())
    for name, tensor in some_tensors().items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_a_file_uri_with_escaped_characters_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "run 1"
    folder.mkdir()
    file, manifest = published(folder)
    assert "%20" in file.as_uri()
    assert set(read_weights(file.as_uri(), manifest)) == set(some_tensors())
    assert set(read_weights(str(file), manifest)) == set(some_tensors())


def test_other_schemes_and_hosts_are_rejected(tmp_path: Path) -> None:
    _, manifest = published(tmp_path)
    for uri in ("https://example.org/weights.safetensors", "file://elsewhere/weights.safetensors"):
        with pytest.raises(WeightsRejected, match="only paths"):
            read_weights(uri, manifest)


def test_tied_tensors_are_written_once_under_their_first_name(tmp_path: Path) -> None:
    shared = torch.randn(6, 4)
    tensors = {"embed": shared, "head": shared, "rows": shared[:3], "turned": shared.t()}
    manifest = write_weights(tmp_path / "w", tensors)
    assert [entry.name for entry in manifest] == ["embed", "rows", "turned"]
    assert set(load_file(tmp_path / "w")) == {"embed", "rows", "turned"}
    assert list(unique_tensors(tensors)) == ["embed", "rows", "turned"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = published(tmp_path)
    before = file.read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="disk on fire"):
        write_weights(file, {"other": torch.zeros(2)})
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    _, manifest = published(tmp_path)
    with pytest.raises(WeightsRejected, match=r"absent.*cannot be read"):
        read_weights(tmp_path / "absent", manifest)


def test_a_truncated_file_is_rejected_wherever_it_ends(tmp_path: Path) -> None:
    file, manifest = published(tmp_path)
    content = file.read_bytes()
    for length in (0, 5, 100, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(WeightsRejected, match="cannot be read"):
            read_weights(file, manifest)


def test_a_flipped_bit_is_rejected(tmp_path: Path) -> None:
    file, manifest = published(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsRejected, match="sha256"):
        read_weights(file, manifest)


def test_what_was_checked_stays_when_the_file_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    manifest = write_weights(file, {"a": torch.ones(1 << 16)})
    tensors = read_weights(file, manifest)
    with file.open("r+b") as opened:
        opened.seek(-(4 << 15), os.SEEK_END)
        opened.write(bytes(4 << 15))
    assert bool((tensors["a"] == 1).all())


def test_a_file_without_some_of_the_tensors_is_rejected(tmp_path: Path) -> None:
    file, manifest = published(tmp_path)
    save_file({"embed": some_tensors()["embed"], "scalar": some_tensors()["scalar"]}, file)
    with pytest.raises(WeightsRejected, match="lacks 3 of 5 tensors: half, steps, view"):
        read_weights(file, manifest)


def test_a_tensor_that_the_manifest_does_not_list_is_rejected(tmp_path: Path) -> None:
    file, manifest = published(tmp_path)
    with pytest.raises(WeightsRejected, match="has unknown 1 of 4 tensors: embed"):
        read_weights(file, manifest[1:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"shape": (4, 5)}, r"shape \[5, 4\], the manifest says \[4, 5\]"), ({"dtype": "F16"}, "F32, the manifest says F16")],
)
def test_a_wrong_shape_or_dtype_is_rejected(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    file, manifest = published(tmp_path)
    changed = msgspec.structs.replace(manifest[0], **change)
    with pytest.raises(WeightsRejected, match=reason):
        read_weights(file, (changed, *manifest[1:]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_rejected_even_if_the_hash_is_right(tmp_path: Path, value: float) -> None:
    tensor = torch.zeros(10)
    tensor[7] = value
    manifest = write_weights(tmp_path / "w", {"bad": tensor})
    with pytest.raises(WeightsRejected, match="bad has values that are not finite"):
        read_weights(tmp_path / "w", manifest)


def test_an_empty_or_repeating_manifest_is_rejected(tmp_path: Path) -> None:
    file, manifest = published(tmp_path)
    for broken in ((), (*manifest, manifest[0])):
        with pytest.raises(WeightsRejected, match="manifest is empty or names a tensor twice"):
            read_weights(file, broken)


def test_the_reason_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    file, manifest = published(tmp_path)
    file.write_bytes(b"nonsense" * 100)
    with pytest.raises(WeightsRejected) as rejected:
        read_weights(file, manifest)
    assert str(file) in str(rejected.value) and "\n" not in str(rejected.value)


def test_check_names_accepts_equal_sets() -> None:
    check_names("model", {"a", "b"}, {"b", "a"})
