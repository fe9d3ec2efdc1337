"""Processors that are taken to multiply in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.inference.torch import precision
from fleetbus_workers.inference.torch.opening import resolve_device


@pytest.mark.parametrize(
    ("flags", "found"),
    [("fpu avx512f avx512_bf16 vaes", True), ("fpu amx_bf16", True), ("fp asimd bf16", True), ("fpu avx2 avx512f", False)],
)
def test_the_flags_of_a_processor_decide(flags: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: f"processor : 0\nflags : {flags}\n\nprocessor : 1\n")
    assert precision.computes_bfloat16.__wrapped__() is found


def test_where_that_cannot_be_read_the_answer_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert precision.computes_bfloat16.__wrapped__() is False


def test_a_device_that_is_not_there_is_refused_by_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == "cpu"
    for given, word in (("cuda:77", "cuda:77"), ("nosuch", "nosuch")):
        with pytest.raises(UserError, match=f"inference.device = {word} cannot be used: .*nvidia-smi"):
            resolve_device(given)
    for has_gpu, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        assert resolve_device("auto") == found
