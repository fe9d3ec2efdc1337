"""Processors that are taken to multiply in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus_workers.inference.torch import precision


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
