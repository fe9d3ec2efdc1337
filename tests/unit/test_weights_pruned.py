"""Weights files of a run that are kept: the newest versions, whatever lineage made the others."""

from __future__ import annotations

from pathlib import Path

from fleetbus_workers.learner.publication import prune_versions, remove_unfinished


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def filled(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).write_bytes(b"x")
    return folder


def test_files_of_lineages_that_were_cut_go_with_those_that_are_too_old(tmp_path: Path) -> None:
    files = [f"l1-v{version:06d}.safetensors" for version in range(6)] + ["l2-v000006.safetensors", "l3-v000007.safetensors"]
    prune_versions(filled(tmp_path, *files), keep=3)
    assert names(tmp_path) == ["l1-v000005.safetensors", "l2-v000006.safetensors", "l3-v000007.safetensors"]


def test_of_two_files_with_one_number_the_newer_lineages_is_kept(tmp_path: Path) -> None:
    prune_versions(filled(tmp_path, "l9-v000004.safetensors", "l10-v000004.safetensors"), keep=1)
    assert names(tmp_path) == ["l10-v000004.safetensors"]


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    others = ["notes.txt", ".l1-v000001.safetensors.part", "model.safetensors"]
    prune_versions(filled(tmp_path, *others, "l1-v000001.safetensors", "l1-v000002.safetensors"), keep=1)
    assert names(tmp_path) == sorted([*others, "l1-v000002.safetensors"])


def test_what_a_kill_left_of_a_version_is_removed_and_whole_versions_stay(tmp_path: Path) -> None:
    left = [f".l1-v000002.safetensors.{'a' * 32}", f".l1-v000002.delta.{'0' * 32}"]
    kept = ["l1-v000001.safetensors", ".l1-v000002.safetensors.part", ".inference-0"]
    remove_unfinished(filled(tmp_path, *left, *kept))
    assert names(tmp_path) == sorted(kept)


def versions(*numbers: int) -> list[str]:
    return [f"l1-v{number:06d}.safetensors" for number in numbers]


def test_versions_that_are_needed_stay_beside_the_newest(tmp_path: Path) -> None:
    removed = prune_versions(filled(tmp_path, *versions(*range(8))), 2, {0, 3, 99})
    assert names(tmp_path) == versions(0, 3, 6, 7)
    assert len(removed) == 4


def test_what_a_kept_version_is_a_difference_to_stays_up_to_the_whole_one(tmp_path: Path) -> None:
    """Versions 0, 4 and 8 are whole: 6 is a difference to 5, and that one to 4."""
    differences = [f"l1-v{number:06d}.delta" for number in range(10) if number % 4]
    prune_versions(filled(tmp_path, *versions(*range(10)), *differences), 1, {0, 6})
    assert names(tmp_path) == sorted([*versions(0, 4, 5, 6, 8, 9), *(f"l1-v{number:06d}.delta" for number in (5, 6, 9))])
