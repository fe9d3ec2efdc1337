"""Attacks under every isolation that a machine has: all of them under the first, whichever that is."""

from __future__ import annotations

import os
import sys

import pytest

from tests.attacks.run import ISOLATIONS, find_lack, plan


@pytest.mark.parametrize(
    ("there", "whole"),
    [(ISOLATIONS, "bubblewrap"), (("namespaces", "none"), "namespaces"), (("none",), "none")],
)
def test_all_attacks_are_tried_under_the_first_isolation_that_is_there(there: tuple[str, ...], whole: str) -> None:
    lacking = {isolation: "" if isolation in there else "not installed" for isolation in ISOLATIONS}
    assert plan(lacking) == [(isolation, isolation == whole) for isolation in ISOLATIONS]


@pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")
def test_what_a_machine_lacks_is_asked_of_what_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))  # without bubblewrap
    assert "bubblewrap: not installed" in find_lack(os.geteuid(), "bubblewrap")
    assert find_lack(os.geteuid(), "none") == ""
