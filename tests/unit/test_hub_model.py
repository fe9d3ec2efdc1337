"""Model ids of the Hugging Face Hub are told from folders, and what cannot be loaded is one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.assembly.hub_model import download_model, is_hub_id


def test_an_id_is_told_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen3-0.6B")
    (tmp_path / "models").mkdir()
    for name in ("", "nowhere", "/a/b", "./a/b", "a/b/c", "models/mine", "~/model"):
        assert not is_hub_id(name)


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else find(name))
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        download_model("Qwen/Qwen3-0.6B")


def test_what_is_found_is_a_folder_and_what_is_out_of_reach_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: dict[str, Any] = {}

    def find(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return "/cache/qwen"

    monkeypatch.setattr(hub, "snapshot_download", find)
    assert download_model("Qwen/Qwen3-0.6B") == Path("/cache/qwen")
    assert asked["name"] == "Qwen/Qwen3-0.6B"

    def fail(name: str, **options: Any) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(UserError, match="out of reach: no route to host") as refused:
        download_model("Qwen/Qwen3-0.6B")
    assert "\n" not in str(refused.value)
