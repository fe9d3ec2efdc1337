"""Weights that another trainer sends: versions are the newest of them, and little is held while they are written."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from structlog.testing import capture_logs

from fleetbus_workers.learner.disk_full import detect_full_disk, tell_full_disk
from fleetbus_workers.trainers.weights import SentWeights


def test_versions_are_the_newest_weights_that_were_sent_and_stay_when_others_come(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sent = SentWeights(tmp_path)
    with pytest.raises(FileNotFoundError, match="sent no weights"):
        sent.save_weights(tmp_path / "l1-v000000.safetensors")
    sent.write([("a", torch.zeros(2)), ("b", torch.ones(3))])
    first = sent.save_weights(tmp_path / "l1-v000000.safetensors")
    content = (tmp_path / "l1-v000000.safetensors").read_bytes()
    sent.write([("a", torch.ones(2)), ("b", torch.ones(3))])
    second = sent.save_weights(tmp_path / "l1-v000001.safetensors")
    assert [entry.name for entry in first] == ["a", "b"]
    assert first[0].sha256 != second[0].sha256
    assert first[1] == second[1]
    assert (tmp_path / "l1-v000000.safetensors").read_bytes() == content
    sent.clear()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["l1-v000000.safetensors", "l1-v000001.safetensors"]


class OnDevice:
    """A tensor of an accelerator, whose copies in this machine's memory are counted while they are held."""

    copies: ClassVar[list[weakref.ref[Any]]] = []
    most = 0

    def __init__(self, tensor: Any) -> None:
        self._tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> Any:
        copy = self._tensor.clone()
        self.copies.append(weakref.ref(copy))
        OnDevice.most = max(self.most, sum(each() is not None for each in self.copies))
        return copy


def test_of_weights_that_are_there_anyway_no_more_than_one_is_copied_at_a_time(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    named: list[tuple[str, Any]] = [(f"layer{number}", OnDevice(torch.full((4,), float(number)))) for number in range(16)]
    sent = SentWeights(tmp_path)
    sent.write(named)
    assert 1 <= OnDevice.most <= 2, "the one that is written, while the next one is made"
    assert len(sent.save_weights(tmp_path / "l1-v000000.safetensors")) == 16


def test_weights_of_another_shape_than_before_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sent = SentWeights(tmp_path)
    sent.write([("a", torch.zeros(2))])
    with pytest.raises(ValueError, match="a is not what was announced"):
        sent.write([("a", torch.zeros(3))])


def test_what_killed_processes_left_is_removed_once_a_version_is_published_and_not_before(tmp_path: Path) -> None:
    """Until then a learner that was not replaced may need it: one that is refused must not end it."""
    torch = pytest.importorskip("torch")
    left = [tmp_path / ".sent-0.safetensors", tmp_path / "..sent-1.safetensors.2"]  # whole, and half written
    for file in left:
        file.write_bytes(b"")
    sent = SentWeights(tmp_path)
    sent.write([("a", torch.zeros(2))])
    assert all(file.exists() for file in left)
    sent.save_weights(tmp_path / "l1-v000000.safetensors")
    assert not any(file.exists() for file in left)
    sent.clear()
    assert [file.name for file in tmp_path.iterdir()] == ["l1-v000000.safetensors"]


def test_a_full_disk_is_waited_for_and_named_before_any_of_the_weights_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    sent, taken, free = SentWeights(tmp_path), [], [10, 10, 1 << 40]
    sent.write([("a", torch.zeros(2))])

    def generate() -> Iterator[tuple[str, Any]]:
        taken.append("a")
        yield "a", torch.ones(2)

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free.pop(0)))
    monkeypatch.setattr("fleetbus_workers.trainers.weights.RETRY_SECONDS", 0.0)
    with capture_logs() as logs:
        sent.write(generate(), check=lambda: taken.append("checked"))
    assert taken == ["checked", "checked", "a"]
    assert {entry["folder"] for entry in logs} == {str(tmp_path)} and "disk is full" in logs[0]["event"]
    assert len(sent.save_weights(tmp_path / "l1-v000000.safetensors")) == 1


def test_a_disk_stays_full_until_the_learner_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def check() -> None:
        raise RuntimeError("the learner has ended")

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(RuntimeError, match="the learner has ended"):
        SentWeights(tmp_path).write([("a", torch.zeros(2))], check=check)


def test_a_disk_that_is_full_all_the_same_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for one user's share of it."""
    torch = pytest.importorskip("torch")

    def stream_weights(*_: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("fleetbus_workers.trainers.weights.stream_weights", stream_weights)
    with pytest.raises(OSError, match=f"free space there and start again: '{tmp_path}'"):
        SentWeights(tmp_path).write([("a", torch.zeros(2))])


def test_the_folder_whose_disk_is_full_is_told_also_where_it_is_not_made_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=0 if place == tmp_path else 1 << 40))
    with capture_logs() as logs:
        tell_full_disk([Path("/"), tmp_path / "out" / "deep"])
        tell_full_disk([Path("/")])
    assert [entry["folder"] for entry in logs] == [str(tmp_path / "out" / "deep")]


def test_a_disk_that_is_away_is_not_told_as_full_and_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network disk's: the learner is to be ended all the same."""

    def fail(_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("shutil.disk_usage", fail)
    with capture_logs() as logs:
        tell_full_disk([tmp_path])
    assert not logs
    with pytest.raises(RuntimeError, match="the trainer's own"), detect_full_disk(tmp_path):
        raise RuntimeError("the trainer's own")
