"""Processors that are taken to multiply in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.config.settings import Configuration, TrainerSettings
from fleetbus.errors import UserError
from fleetbus.processors import multiplies_bfloat16
from fleetbus_workers.inference.torch.opening import resolve_device
from fleetbus_workers.up.command import describe_float32


@pytest.mark.parametrize(
    ("flags", "found"),
    [("fpu avx512f avx512_bf16 vaes", True), ("fpu amx_bf16", True), ("fp asimd bf16", True), ("fpu avx2 avx512f", False)],
)
def test_the_flags_of_a_processor_decide(flags: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: f"processor : 0\nflags : {flags}\n\nprocessor : 1\n")
    assert multiplies_bfloat16.__wrapped__() is found


def test_where_that_cannot_be_read_the_answer_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert multiplies_bfloat16.__wrapped__() is False


def test_a_device_that_is_not_there_is_refused_by_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == "cpu"
    for given, word in (("cuda:77", "cuda:77"), ("nosuch", "nosuch")):
        with pytest.raises(UserError, match=f"inference.device = {word} cannot be used: .*nvidia-smi"):
            resolve_device(given)
    for has_gpu, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        assert resolve_device("auto") == found


@pytest.mark.parametrize(("has_it", "precision", "device", "told"), [
    (False, "auto", "cpu", 1), (True, "auto", "cpu", 0), (False, "float32", "cpu", 0), (False, "auto", "cuda", 0),
])  # fmt: skip
def test_up_says_that_a_recipe_takes_longer_where_auto_is_float32(
    has_it: bool, precision: str, device: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbus_workers.up.command.multiplies_bfloat16", lambda: has_it)
    settings = TrainerSettings(precision=precision, device=device)  # type: ignore[arg-type]
    lines = describe_float32(Configuration(trainer=settings))
    assert len(lines) == told
    assert all("in float32 a step takes several times as long" in line for line in lines)
